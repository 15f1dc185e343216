"""Two attentions of the same queries over different keys, merged by their log-sum-exp."""

import torch


def merged(first: tuple[torch.Tensor, ...], second: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of both together, from those of each.

    out is (B, H, S, D) of any floating-point dtype, lse float32 (B, H, S); -inf where nothing is kept.
    """
    (out, lse), (other, other_lse) = first, second
    both = torch.logaddexp(lse, other_lse)
    # Rows of nothing are 0 in both; a share of exp(-inf - -inf) would be NaN.
    base = both.masked_fill(both == -torch.inf, 0.0)
    shares = [torch.exp(x - base)[..., None] for x in (lse, other_lse)]
    return (out.float() * shares[0] + other.float() * shares[1]).to(out.dtype), both
