"""Rows in which a constant and a run-time mask, split from each other, leave only finite fills.

A softmax of equal fills is an average.  The kernel averages over the keys that the constant mask keeps.  PyTorch
averages over all keys if one fill stands for both masks,

    softmax(where(constant & run_time, scores, fill)) v

and, if the fills of both masks are added up, over the keys that one of the two keeps, because the others are lower:

    softmax(scores + where(constant, 0, fill) + where(run_time, 0, fill)) v

If the run-time mask's fill is far higher than the constant one's, nothing has to be done: only keys that the constant
mask keeps count.  If it is lower, keys that the constant mask drops get the weight, so the two masks must not be split.
If the run-time mask fills with -inf and only the constant one with a finite number, PyTorch averages over the keys that
the run-time mask keeps.

These rows are known as soon as the run-time mask is known, and they are the same in all layers.  If the user gave a
mask or a rule, the result in these rows is 0: the run-time mask then fills with -inf, which is the same in all others.
"""

from dataclasses import dataclass

import numpy as np
from tvm import relax

from relax_passes.attention.masks.terms import Term, Terms
from relax_passes.attention.spellings.normal_form import ABSORBING
from relax_passes.ir.bindings import dtype_of, shape_of

op = relax.op


@dataclass(frozen=True)
class PartedFill:
    """One finite fill of a constant and of a run-time mask.

    `keep` is the constant mask, bool (1 or B, 1 or H, Sq, Skv).  `run_time` is the run-time mask, boolean and of the
    same rank, with length 1 along the rows or the columns.  `fill` is the number where either mask drops a score.
    `is_joint`: one fill stands for both masks, so that fills do not add up.  `is_hard`: the run-time mask fills with
    -inf instead.
    """

    keep: np.ndarray
    run_time: Term
    fill: float
    is_joint: bool
    is_hard: bool = False

    @property
    def absorbed(self) -> float:
        """Scores up to this magnitude are lost in rounding where the fill is added to them."""
        return float(abs(np.spacing(np.float32(self.fill)))) / 2


def parted_fill(terms: Terms, arrays: list[tuple[np.ndarray, Term]], mask, averages: bool) -> PartedFill | None:
    """The fill that two masks share, if nothing else masks.

    `arrays` are the values of `terms.closed_bias`, float32 or bool, of shapes (1 or B, 1 or H, 1 or Sq, 1 or Skv);
    `mask` is the mask that they make, bool, in normal form.  With `averages`, each of its rows must keep something.
    """
    if terms.closed_keep or len(terms.open_keep) + len(terms.open_bias) != 1 or mask is None:
        return None
    (run_time,) = (*terms.open_keep, *terms.open_bias)
    is_hard = bool(terms.open_keep) or run_time.fill == -np.inf
    if (run_time.fill is None and not is_hard) or len(run_time.shape) > 4:
        return None
    run_time = Term(run_time.expr, (1,) * (4 - len(run_time.shape)) + run_time.shape, run_time.fill, run_time.is_joint)
    found = []
    for array, term in arrays:
        array = array.reshape((1,) * (4 - len(term.shape)) + term.shape)
        if term.fill is not None:
            found.append((array, term.fill, term.is_joint))
        elif array.min(initial=0) <= ABSORBING:
            if set(np.unique(array)) - {0.0, array.min()}:
                return None
            found.append((array == 0, float(array.min()), False))
        elif np.abs(array).max(initial=0) > -ABSORBING / 10:
            return None
    if len(found) != 1 or 1 not in run_time.shape[-2:]:
        return None
    ((keep, fill, is_joint),) = found
    if (
        (fill != run_time.fill and not is_hard)
        or fill == -np.inf
        or is_joint != (run_time.is_joint and not is_hard)
        or not _equal(keep, mask)
        or averages
        and not mask.any(-1).all()
    ):
        return None
    return PartedFill(np.broadcast_to(mask, (*mask.shape[:2], *keep.shape[-2:])), run_time, fill, is_joint, is_hard)


def highest_dropped(arrays: list[tuple[np.ndarray, Term]], mask: np.ndarray) -> float:
    """The largest sum of constants where `mask` drops a score; -inf if it drops none.

    `arrays` are as in `parted_fill`; `mask` is bool of shape (1 or B, 1 or H, 1 or Sq, 1 or Skv).  If a run-time mask
    fills with less than this sum, the scores that `mask` drops get the weight.
    """
    total = np.zeros(mask.shape, np.float32)
    for array, term in arrays:
        if term.fill is not None:
            array = np.where(array, np.float32(0), np.float32(term.fill))
        with np.errstate(over="ignore"):
            total = total + array.reshape((1,) * (4 - len(term.shape)) + term.shape)
    return float(np.max(total, where=~np.broadcast_to(mask, total.shape), initial=-np.inf))


def emit_averages(emit, parted: PartedFill, run_time, empty, v, out) -> relax.Var:
    """`out` (B, H, Sq, Dv) with PyTorch's averages in the rows that are `empty`; `run_time` is the run-time mask."""
    if parted.is_joint:
        keys = None
    elif parted.run_time.shape[-1] == 1:  # whole rows: the kernel has averaged over the right keys
        return out
    else:
        keys = run_time
    dtype, (_, heads, _, _) = dtype_of(out), shape_of(out)
    group = heads // shape_of(v)[1]
    v = v if dtype_of(v) == "float32" else emit(op.astype(v, "float32"))
    if keys is None:
        average = emit(op.mean(v, axis=2, keepdims=True))
        average = average if group == 1 else emit(op.repeat(average, group, axis=1))
    else:
        v = v if group == 1 else emit(op.repeat(v, group, axis=1))
        chosen = emit(op.astype(keys, "float32"))
        shape = shape_of(v)
        chosen = emit(op.broadcast_to(chosen, (*shape[:2], 1, shape[2])))
        total = emit(op.matmul(chosen, v))
        if parted.is_hard:
            chosen_keys = emit(op.sum(chosen, axis=-1, keepdims=True))
            some = emit(op.greater(chosen_keys, relax.const(0.0, "float32")))
            empty = emit(op.logical_and(empty, some))  # other rows have nothing at all
            average = emit(op.divide(total, chosen_keys))
            average = average if dtype == "float32" else emit(op.astype(average, dtype))
            return emit(op.where(empty, average, out))
        counts = relax.const(parted.keep.sum(-1, keepdims=True).astype("float32"))
        out32 = out if dtype == "float32" else emit(op.astype(out, "float32"))
        total = emit(op.add(emit(op.multiply(out32, counts)), total))
        average = emit(op.divide(total, emit(op.add(counts, emit(op.sum(chosen, axis=-1, keepdims=True))))))
    average = average if dtype == "float32" else emit(op.astype(average, dtype))
    return emit(op.where(empty, average, out))


def emit_emptied_rows(emit, keep: np.ndarray, run_time) -> relax.Var:
    """Bool (1 or B, 1 or H, Sq, 1): the rows in which two masks together keep nothing.

    `keep` is the constant mask, as in PartedFill; `run_time` is the run-time mask, of four dimensions.
    """
    if shape_of(run_time)[-1] == 1:
        return emit(op.logical_not(run_time))
    columns = np.arange(keep.shape[-1], dtype="int32")
    counts = keep.sum(-1, keepdims=True).astype("int32")
    if np.array_equal(keep, columns < counts):  # as in a causal mask: each row keeps its first keys
        positions = op.where(run_time, relax.const(columns.reshape(1, 1, 1, -1)), relax.const(len(columns), "int32"))
        first = emit(op.min(emit(positions), axis=-1, keepdims=True))
        return emit(op.greater_equal(first, relax.const(counts)))
    kept = emit(op.astype(emit(op.logical_and(relax.const(keep, "bool"), run_time)), "int32"))
    return emit(op.equal(emit(op.max(kept, axis=-1, keepdims=True)), relax.const(0, "int32")))


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays that broadcast to each other hold the same."""
    a, b = np.broadcast_arrays(a, b)
    return np.array_equal(a, b)
