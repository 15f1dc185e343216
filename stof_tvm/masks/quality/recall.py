"""How much of an attention's softmax a mask keeps."""

from typing import NamedTuple

import torch

from stof_tvm.masks.arguments import as_number, check_int
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.quality.weights import (
    Attention,
    MaskRows,
    check_attention,
    default_scale,
    softmax_of,
)
from stof_tvm.masks.runtime.rule import Rule, for_rule
from stof_tvm.masks.tensors import from_tensor
from stof_tvm.running.between_graphs import AT_ONCE, between_graphs
from stof_tvm.running.has_data import check_has_data
from tir_kernels.errors import MaskError


class Recall(NamedTuple):
    """Kept softmax mass, from 0 to 1: `mean`, over all heads and rows, and `heads`, a float64 tensor (B, H)."""

    mean: float
    heads: torch.Tensor


@between_graphs(AT_ONCE)
def recall(
    mask: Mask | Rule | torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float | None = None,
    within=None,
    rows: int | None = None,
) -> Recall:
    """The share of the softmax's mass that a mask keeps, averaged over rows.

    1 means that attention with the mask gives what it gives without.  It is computed in float32 where q and k are, some
    rows at a time, so that no q_len × kv_len array is held.

    Parameters
    ----------
    mask : Mask, bool tensor or Rule
        True is kept; a tensor broadcasts to (B, H, Sq, Skv).  A rule of `masks.runtime` is asked about q and k.
    q, k : Tensor
        Floating point, (B, H, Sq, D) and (B, Hkv, Skv, D); H is a multiple of Hkv.
    scale : float, optional
        What scores are multiplied by; default: 1 / √D.
    within : Mask or bool tensor, optional
        The pairs that count as the whole, such as `masks.causal()`.  Default: all.  Rows of which it keeps nothing are
        left out of averages.
    rows : int, optional
        Look at that many evenly spaced query rows instead of all.

    Raises
    ------
    MaskError
        A mask that is none, or does not fit the sizes.
    InputError
        Tensors that do not belong together.
    """
    check_attention(q, k)
    scale = None if scale is None else as_number("scale", scale)
    for name, x in (("q", q), ("k", k)):
        check_has_data(name, x, "recall looks at its values")
    if isinstance(mask, Rule):
        mask = mask.mask(*for_rule(q.detach(), k.detach(), scale))
    mask = _as_mask("mask", mask)
    rows = None if rows is None else check_int("rows", rows, least=1)
    attention = Attention(q.detach(), k.detach(), None, default_scale(q) if scale is None else scale)
    heads, _ = kept_shares(attention, mask, None if within is None else _as_mask("within", within), rows)
    return Recall(float(heads.mean()), heads)


def kept_shares(
    attention: Attention, mask: Mask, within: Mask | None = None, rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 (B, H), twice: what a mask keeps of the softmax's mass, averaged over rows, and of the pairs.

    The whole is what the attention itself keeps, and `within` too; 1 where that is nothing.  With `rows`, that many
    evenly spaced query rows are looked at.
    """
    device, shape = attention.q.device, attention.sizes[:2]
    keep = MaskRows(mask, attention.sizes, device)
    inside = None if within is None else MaskRows(within, attention.sizes, device)
    mass, counted, pairs, of = (torch.zeros(shape, dtype=torch.float64, device=device) for _ in range(4))
    for i, scores, whole in attention.chunks(rows, inside):
        some, weights, kept = whole.any(-1), softmax_of(scores, whole), keep(i)
        mass += torch.where(some, (weights * kept).sum(-1, dtype=torch.float64), 0.0).sum(-1)
        counted += some.expand(*shape, len(i)).sum(-1)
        pairs += (kept & whole).expand(*shape, *scores.shape[2:]).sum((2, 3))
        of += whole.expand(*shape, *scores.shape[2:]).sum((2, 3))
    shares = (torch.where(n > 0, x / n.clamp(min=1), 1.0).cpu() for x, n in ((mass, counted), (pairs, of)))
    return next(shares), next(shares)


def _as_mask(name: str, given) -> Mask:
    if isinstance(given, Mask):
        return given
    if isinstance(given, torch.Tensor) and given.dtype == torch.bool and given.ndim >= 2:
        return from_tensor(given)
    what = f"{given.dtype} tensor {tuple(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
    raise MaskError(f"{name} must be a Mask or a bool tensor of 2 to 4 dimensions (True is kept), got {what}")
