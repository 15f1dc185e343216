"""What the operators of a function leave open, chosen anew: their roundings, and which of equal numbers are largest."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stof_tvm.verification.comparison import CLOSE

aten = torch.ops.aten
# What underflows to 0 is a number below the least normal one; of a score of -inf it is 0 for certain.
EXPONENTIALS = {aten.exp, aten.exp2, aten.exp_, aten._softmax, aten._safe_softmax}
ROUNDED = EXPONENTIALS | {
    *(aten.add, aten.sub, aten.mul, aten.div, aten.add_, aten.sub_, aten.mul_, aten.div_, aten.rsub, aten.reciprocal),
    *(aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten.mv, aten.dot),
    *(aten.sum, aten.mean, aten.cumsum, aten.prod, aten.logsumexp, aten._log_softmax, aten.linalg_vector_norm),
    *(aten.log, aten.log2, aten.sqrt, aten.rsqrt, aten.pow, aten.tanh, aten.sigmoid, aten.silu, aten.gelu),
    *(aten.cos, aten.sin),
}


class OtherRoundings(TorchDispatchMode):
    """While it is entered, operators give what they may as well have given, at random.

    Results of operators that round are moved, each element by itself, by at most CLOSE of itself; exponentials that
    have underflowed to 0 by less than the least normal number.  What only compares or moves numbers stays exact, but
    `topk` takes any of equal numbers.

    Parameters
    ----------
    seed : int
    """

    def __init__(self, seed: int):
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        if func is aten.topk.default:
            return self._largest(*args, **kwargs)
        # An operator in place may write its argument: where it had -inf is asked before.
        underflows = args[0] != -torch.inf if packet in EXPONENTIALS else None
        out = func(*args, **kwargs)
        if packet in ROUNDED and isinstance(out, torch.Tensor) and out.dtype in CLOSE:
            out.mul_(1 + CLOSE[out.dtype] * (2 * self._random(out) - 1))
            if underflows is not None:
                out.add_(torch.finfo(out.dtype).tiny * self._random(out) * underflows)
        return out

    def _largest(self, x, k, dim=-1, largest=True, is_sorted=True):
        """The k largest of x in a random order, and where in x they are."""
        order = torch.randperm(x.shape[dim] if x.dim() else 1, generator=self._generator(x.device), device=x.device)
        values, places = aten.topk(x.index_select(dim, order), k, dim, largest, is_sorted)
        return values, order[places]

    def _random(self, like: torch.Tensor) -> torch.Tensor:
        """Numbers from 0 to 1, of a tensor's shape, dtype and device."""
        generator = self._generator(like.device)
        return torch.rand(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self.generators:
            self.generators[device] = torch.Generator(device).manual_seed(self.seed)
        return self.generators[device]
