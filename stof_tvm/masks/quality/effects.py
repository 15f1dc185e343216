"""What each candidate does to an attention, a mask or a rule: the pairs that it keeps, and the loss that it causes."""

from dataclasses import dataclass

import torch

from stof_tvm.masks.mask import Mask, per_head
from stof_tvm.masks.quality.weights import Attention, MaskRows, grouped_product, softmax_of
from stof_tvm.masks.runtime.rule import Rule, for_rule


@dataclass
class Effects:
    """Sums over batch entries and rows for each head and candidate, float64 (H, candidates).

    Attributes
    ----------
    loss : Tensor
        What the candidates cost, see `measure`.
    kept : Tensor
        Pairs that are kept, among those that the attention itself keeps.
    whole : Tensor
        (H,): pairs that the attention itself keeps.
    """

    loss: torch.Tensor
    kept: torch.Tensor
    whole: torch.Tensor

    def __iadd__(self, other: "Effects") -> "Effects":
        self.loss += other.loss
        self.kept += other.kept
        self.whole += other.whole
        return self


def measure(
    attention: Attention,
    options: list[list[Mask | Rule]],
    gradient: torch.Tensor | None = None,
    rows: int | None = None,
) -> Effects:
    """The effects of each head's options, lists of one length; a rule is all heads' at its place.

    A rule is asked about the attention's q and k, as kernels ask it.

    Where a mask keeps less, the softmax is over what is left, and the head's results change by Δ.  Without a gradient,
    the loss is |Δ|² over the sum of all heads' |result|².  With the gradient of a model's loss by the results, (B, H,
    Sq, Dv), it is |gradient · Δ|, row by row: the change of the model's loss in first order, without one row's gain for
    another's loss.

    MaskError where a mask does not fit the attention.
    """
    batch, heads, q_len, kv_len = attention.sizes
    device = attention.q.device
    columns = [list(column) for column in zip(*options, strict=True)]
    keeps = [MaskRows(_mask_of(column, attention), attention.sizes, device) for column in columns]
    assert attention.v is not None
    v = attention.v.float()
    loss, kept = (torch.zeros(heads, len(columns), dtype=torch.float64, device=device) for _ in range(2))
    whole_pairs = torch.zeros(heads, dtype=torch.float64, device=device)
    energy = 0.0
    for i, scores, whole in attention.chunks(rows):
        result = grouped_product(softmax_of(scores, whole), v)
        energy += float(result.square().sum(dtype=torch.float64))
        shape = batch, heads, len(i), kv_len
        whole_pairs += whole.expand(shape).sum((0, 2, 3))
        part_of_gradient = None if gradient is None else gradient[:, :, i].float()
        for c, keep in enumerate(keeps):
            inside = keep(i) & whole
            kept[:, c] += inside.expand(shape).sum((0, 2, 3))
            change = grouped_product(softmax_of(scores, inside), v) - result
            if part_of_gradient is None:
                loss[:, c] += change.square().sum((0, 2, 3), dtype=torch.float64)
            else:
                loss[:, c] += (part_of_gradient * change).sum(-1).abs().sum((0, 2), dtype=torch.float64)
    if gradient is None and energy > 0:
        loss /= energy
    return Effects(loss.cpu(), kept.cpu(), whole_pairs.cpu())


def _mask_of(column: list[Mask | Rule], attention: Attention) -> Mask:
    """What the heads' options at one place keep in an attention."""
    first = column[0]
    if isinstance(first, Rule):
        return first.mask(*for_rule(attention.q, attention.k, attention.scale))
    return first if len(set(column)) == 1 else per_head(column)
