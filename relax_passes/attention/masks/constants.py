"""Constant masks and biases of an attention in normal form: a mask for weights of 0, and a bias for the rest."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from relax_passes.attention.masks.terms import broadcast
from relax_passes.attention.site_names import named
from relax_passes.attention.spellings.normal_form import ABSORBING, ASSUMED
from tir_kernels.errors import MaskError

HUGE = -1e4  # if a bias has values this low, its masked values are replaced by 0


@dataclass(frozen=True)
class Constants:
    """The closed part of a site's mask and bias, in normal form.

    `mask` is true where a score is kept (None: everywhere), and `bias` is added to the scores (None: nothing).
    `has_averaging_rows` says that some rows have only huge negative values.  `hard` is true where the closed part is
    not -inf (None: everywhere).  `is_hard` says that masked scores have weight 0 whatever is added at run time: the
    mask was boolean or -inf.  `assumed` is the least distance of a masked value below its row's largest, if an
    assumption on scores masks it, else None.
    """

    mask: np.ndarray | None
    bias: np.ndarray | None
    has_averaging_rows: bool
    is_hard: bool
    hard: np.ndarray | None = None
    assumed: float | None = None


def fold(
    keep: list[np.ndarray],
    bias: list[np.ndarray],
    site: str,
    fills=(),
    gap: float = -ASSUMED,
    given: Callable[[], np.ndarray | None] | None = None,
) -> Constants:
    """Bring closed masks and additive terms into normal form.

    Parameters
    ----------
    keep, bias : lists of bool and of float arrays
        A score is kept where all of `keep` hold; all of `bias` are added to it.  They broadcast to (B, H, Sq, Skv).
    fills : list of (bool array, float)
        Biases that are 0 where the array holds, and the number elsewhere.
    gap : float
        A value that is this far below its row's largest has weight 0.
    given : callable, optional
        Gives the user's mask, bool, or None where it is not known, or too large to be dense.  A value has weight 0 only
        if it is that far below the largest one that this mask keeps, too.  Fills of `HUGE` and lower count as the
        model's own mask: a row in which both masks leave nothing else is masked.  Without a user's mask, rows of
        nothing but finite fills average, as in PyTorch.

    Raises MaskError, naming `site`, for NaN or +inf, and where nothing is kept.
    """
    bias = [np.asarray(b, np.float32) for b in bias]
    for b in bias:
        if np.isnan(b).any() or np.isposinf(b).any():
            what = "NaN" if np.isnan(b).any() else "+inf"
            raise MaskError(f"attention {named(site)}: its mask or bias holds {what}")
    infinite = [~np.isneginf(b) for b in bias if np.isneginf(b).any()]
    mask = hard = _all([*keep, *infinite, *(k for k, fill in fills if np.isneginf(fill))])
    highest = -gap if given is None else min(-gap, HUGE)
    soft = [(k, fill) for k, fill in fills if -np.inf < fill <= highest]
    filled = _all([mask, *(k for k, _ in soft)])
    nearest = np.inf
    is_emptied = given is None and not np.array_equal(filled.any(-1), np.broadcast_to(mask.any(-1), filled.shape[:-1]))
    if not is_emptied and len({fill for _, fill in soft}) < 2 and not _spread(bias) >= gap:
        mask = filled
        nearest = min([-fill - _spread(bias) for _, fill in soft], default=np.inf)
        soft = []
    # Where some row is filled throughout, or fills meet other huge values, the sums of all values decide what masks.
    finite = [(k, fill) for k, fill in fills if highest < fill] + soft
    bias += [np.where(k, np.float32(0), np.float32(fill)) for k, fill in finite]
    has_averaging_rows, overflowed = False, np.zeros((), bool)
    if _spread(bias) >= gap or any(b.max() <= ASSUMED for b in bias) or is_emptied:
        mask, has_averaging_rows, farthest, overflowed = _mask_what_is_far_below(mask, bias, gap, given)
        nearest = min(nearest, farthest)
    if not mask.any():
        raise MaskError(f"attention {named(site)}: its mask keeps nothing")
    rest = None
    for b in bias:
        b = _four_dimensional(b)
        if b.min() <= HUGE:  # masked values need no bias
            b = np.where(mask, b, np.float32(0))
        rest = b if rest is None else rest + b
    if rest is not None:
        rest = _squeezed(rest, axes=range(4)) if rest.any() else None
    assumed = float(nearest) if gap == -ASSUMED and nearest < -ABSORBING else None
    is_hard = mask is hard or mask.shape == hard.shape and np.array_equal(mask, hard)
    kept, kept_from_inf = (None if x.all() else _squeezed(x, axes=(0, 1)) for x in (mask, hard & ~overflowed))
    return Constants(kept, rest, has_averaging_rows, is_hard, kept_from_inf, assumed)


def _spread(biases) -> float:
    """An upper bound of how far two values of a row are apart, -inf left out."""
    finite = (b[~np.isneginf(b)] for b in biases)
    return float(sum((np.float64(x.max()) - np.float64(x.min()) for x in finite if x.size), start=0.0))


def _mask_what_is_far_below(mask, biases, gap, given):
    """(mask, whether some row averages, the least distance, where the biases add up to -inf).

    The new mask also drops scores that the biases put at least `gap` below the row's largest value, and scores where
    the biases add up to -inf.  A row averages if its largest value is at most `ASSUMED`; with a user's mask such rows
    are masked instead.  The least distance is that of a score dropped here below its row's largest.
    """
    summands = (np.where(np.isneginf(b), np.float32(0), b) for b in biases)
    with np.errstate(over="ignore"):
        total = _four_dimensional(functools.reduce(np.add, summands).astype(np.float32))
    total = np.broadcast_to(total, broadcast(total.shape, mask.shape))
    row_max, below = _below_largest(total, mask)
    averaging = (row_max <= ASSUMED) & ~np.isneginf(row_max)
    far = below >= gap
    if given is not None:
        mask, averaging = mask & ~averaging, np.zeros((), bool)
        far &= total <= HUGE
        if (restricted := given()) is not None:
            far = far | (_below_largest(total, mask & restricted)[1] >= gap)
    far = mask & far
    infinite = np.isneginf(total)  # huge values may add up to -inf
    farthest = float(np.broadcast_to(below, far.shape)[far].min(initial=np.inf))
    return mask & ~far & ~infinite, bool(averaging.any()), farthest, infinite


def _below_largest(total, mask) -> tuple[np.ndarray, np.ndarray]:
    """The largest value that `mask` keeps of each row, and how far each value is below it; 0 in rows without any."""
    largest = np.max(np.where(mask, total, -np.inf), axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        return largest, np.where(np.isneginf(largest), 0, largest.astype(np.float64) - total)


def _all(keeps) -> np.ndarray:
    result = np.ones((1, 1, 1, 1), bool)
    for keep in sorted(keeps, key=lambda k: k.size):
        result = result & keep
    return result


def _squeezed(array: np.ndarray, axes) -> np.ndarray:
    """`array` with length 1 along those of `axes` along which its values do not change."""
    for axis in axes:
        first = array.take([0], axis)
        if (array == first).all():
            array = first
    return np.ascontiguousarray(array)


def _four_dimensional(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)
