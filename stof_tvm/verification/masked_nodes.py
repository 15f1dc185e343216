"""Modules that take the place of nodes of an exported graph: the same computation, with a mask of the user's applied.

A mask only removes: where it is false, scores become -inf.  If it removes all that the model itself had left of
a row, the row gives 0, as in the kernels; a row that the model empties by itself stays what PyTorch makes of it.  A
score counts as left if it is above `lowest`, which is -inf or one of FILLS.  With one of FILLS, a row of nothing but
the model's fills gives 0, too.
"""

import math

import torch
from torch.fx import Node

CHUNK_SCORES = 1 << 26  # scores of attention held at a time: a quarter of a gigabyte in float32
# Scores this low are a model's fills for its mask (-1e4, -1e8, torch.finfo's), if its real scores do not reach them.
FILLS = (-9e3, -9e7, -9e29)
WORTH_GATHERING = 0.5  # if a chunk of rows keeps less than this share of the columns, reading only these is faster


class Keep:
    """A dense mask for scores of one shape, made once for each device.

    Parameters
    ----------
    dense : torch.Tensor
        Bool (Sq, Skv) or (B or 1, H or 1, Sq, Skv).
    lead : tuple of int
        The scores' dimensions before the last two: batch and heads, in whatever number of dimensions.
    batch, heads : int
        The attention's sizes; their product is that of `lead`.
    positions : torch.fx.Node, optional
        The node that holds the mask's row of each query, if not all rows of the mask are the scores', in order.
    """

    def __init__(
        self, dense: torch.Tensor, lead: tuple[int, ...], batch: int, heads: int, positions: Node | None = None
    ):
        if dense.dim() == 4:
            sizes = dense.shape[-2:]
            dense = dense[0, 0] if dense.shape[:2] == (1, 1) else dense.expand(batch, heads, *sizes)
            dense = dense.reshape(*lead, *sizes) if dense.dim() == 4 else dense
        self.lead, self.positions = lead, positions
        self.rows, self.columns = dense.shape[-2:]
        if positions is not None:
            self.rows = positions.meta["val"].numel()
        self.on = {dense.device: dense}

    def to(self, device: torch.device, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Bool (Sq, Skv) or (*lead, Sq, Skv) on a device; `positions` are the values of the node, if there is one."""
        if device not in self.on:
            self.on[device] = next(iter(self.on.values())).to(device)
        dense = self.on[device]
        return dense if positions is None else dense[..., positions.to(device).flatten(), :]


class MaskedSdpa(torch.nn.Module):
    """`aten.scaled_dot_product_attention` with a mask, some rows at a time, reading only columns that they keep."""

    def __init__(self, target, keep: Keep):
        super().__init__()
        self.target, self.keep, self.lowest = target, keep, -math.inf
        scores = math.prod(keep.lead) * keep.columns
        self.chunk = max(1, min(keep.rows, CHUNK_SCORES // max(1, scores)))
        if self.chunk < keep.rows:
            self.chunk = max(1, min(self.chunk, 512))  # a few rows keep only a few columns
        self.columns: dict = {}  # (first row, device) -> the columns to read, or None for all

    def forward(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, positions=None, **more):
        keep, parts = self.keep.to(query.device, positions), []
        own = None if attn_mask is None else attn_mask.expand(*attn_mask.shape[:-2], self.keep.rows, self.keep.columns)
        for first in range(0, self.keep.rows, self.chunk):
            rows = slice(first, min(first + self.chunk, self.keep.rows))
            kept = keep[..., rows, :]
            present = self._own_keep(own, is_causal, rows, kept)
            columns = None if positions is not None else self._columns(rows, kept)
            mask = kept if present is None else kept & present
            emptied = ~mask.any(-1)
            if present is not None and self.lowest == -math.inf:
                emptied = emptied & present.any(-1)
            if own is not None and own.dtype != torch.bool:
                mask = own[..., rows, :].masked_fill(~mask, -math.inf).to(query.dtype)
            k, v = key, value
            if columns is not None:
                k, v, mask = key[..., columns, :], value[..., columns, :], mask[..., columns]
            out = self.target(query[..., rows, :], k, v, mask, dropout_p, False, **more)
            parts.append(out.masked_fill(emptied[..., None], 0.0))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -2)

    def _columns(self, rows: slice, kept):
        """The columns that some row or head keeps, where they are few; else None."""
        if self.chunk == self.keep.rows:
            return None
        where = rows.start, kept.device
        if where not in self.columns:
            found = kept.reshape(-1, kept.shape[-1]).any(0).nonzero().flatten()
            is_few = 0 < len(found) < WORTH_GATHERING * kept.shape[-1]
            self.columns[where] = found if is_few else None
        return self.columns[where]

    def _own_keep(self, own, is_causal: bool, rows: slice, kept):
        """Bool: what the model's own mask leaves of some rows; None where it leaves everything."""
        if is_causal:
            i = torch.arange(rows.start, rows.stop, device=kept.device)[:, None]
            return torch.arange(kept.shape[-1], device=kept.device) <= i
        if own is None:
            return None
        return own[..., rows, :] if own.dtype == torch.bool else own[..., rows, :] > self.lowest


class MaskedScores(torch.nn.Module):
    """Scores with -inf where the mask is false; rows that this would empty stay as they are, for `ZeroRows` to clear.

    `first` is the column at which the keys begin: scores may have columns beside them, such as those of sinks, which
    no mask removes.
    """

    def __init__(self, keep: Keep, first: int = 0):
        super().__init__()
        self.keep, self.first, self.lowest = keep, first, -math.inf

    def forward(self, scores, positions=None):
        keep = self._keep(scores, positions)
        return scores.masked_fill(~(keep | self._emptied(scores, keep)[..., None]), -math.inf)

    def _emptied(self, scores, keep):
        """Bool, the scores' shape without its last dimension: rows of which a mask removes all that the model left."""
        present = scores > self.lowest
        emptied = ~(present & keep).any(-1)
        return emptied & present.any(-1) if self.lowest == -math.inf else emptied

    def _keep(self, scores, positions):
        keep = self.keep.to(scores.device, positions)
        around = self.first, scores.shape[-1] - self.first - self.keep.columns
        return torch.nn.functional.pad(keep, around, value=True) if any(around) else keep


class ZeroRows(MaskedScores):
    """Weights, or their logarithms, which are `zero` in rows that a mask empties; `scores` are the unmasked ones."""

    def __init__(self, keep: Keep, first: int = 0, zero: float = 0.0):
        super().__init__(keep, first)
        self.zero = zero

    def forward(self, weights, scores, positions=None):  # type: ignore[override]  # called by nothing else
        return weights.masked_fill(self._emptied(scores, self._keep(scores, positions))[..., None], self.zero)
