"""What rounding may do to a result: float64 with each operator's operands or result disturbed as rounding does it."""

import functools

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# Sums of many terms: the error is one of the terms, which may cancel.
SUMS = {
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "sum",
    "mean",
    "cumsum",
    "convolution",
    "var",
    "std",
    "linalg_vector_norm",
    "var_mean",
    "native_layer_norm",
    "native_group_norm",
    "native_batch_norm",
    "_fused_rms_norm",
    "logsumexp",
    "_softmax",
    "_log_softmax",
    "prod",
    "cumprod",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_cdist_forward",
    "_euclidean_dist",
    "avg_pool2d",
    "avg_pool1d",
    "_adaptive_avg_pool2d",
    "matmul",
    "linear",
    "dot",
}
# Results that are rounded.
ROUNDED = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "exp",
    "exp2",
    "log",
    "log1p",
    "expm1",
    "sqrt",
    "rsqrt",
    "pow",
    "reciprocal",
    "sigmoid",
    "tanh",
    "erf",
    "gelu",
    "silu",
    "mish",
    "elu",
    "softplus",
    "sin",
    "cos",
    "lerp",
    "addcmul",
    "addcdiv",
    "hardswish",
    "hardsigmoid",
    "log_sigmoid_forward",
    "atan",
    "atan2",
    "sinh",
    "fmod",
    "remainder",
    "polar",
    "glu",
    "leaky_relu",
    "_to_copy",
    "frac",
}


# Tails that come of 1 - tanh or 1 - erf: the error is one of the argument's.
TAILS = {"gelu", "mish"}


# Finite operands of these may have a result that is not: how far depends on order, and on what is computed at once.
OVERFLOWING = SUMS | {"exp", "exp2", "expm1", "mul", "add", "sub", "rsub", "addcmul"}


class Overflows(TorchDispatchMode):
    """Notes the operators whose finite operands gave infinities or NaN."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        may = name in OVERFLOWING and operands
        finite = [x.isfinite() for x in operands] if may else []
        result = func(*args, **(kwargs or {}))
        for out in tree_leaves(result) if may else []:
            if not isinstance(out, torch.Tensor) or not out.is_floating_point():
                continue
            here = [x if name not in SUMS else x.all() for x in finite]
            if (~out.isfinite() & functools.reduce(torch.logical_and, here)).any():
                self.names.append(name)
        return result


class Rounding(TorchDispatchMode):
    """Disturbs results by up to one `eps` of relative error; what only moves or selects is exact.

    `flushed`: what is within an eps of a row's largest may be 0 as well, which a bool of it tells from a small number;
    in half of the tensors nothing else is disturbed, so that what is left may cancel exactly.
    """

    def __init__(self, eps: float, seed: int, flushed: bool = False):
        super().__init__()
        self.eps, self.generator, self.flushed = eps, torch.Generator().manual_seed(seed), flushed

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = (
            func.overloadpacket.__name__.rstrip("_")
            if not func.overloadpacket.__name__.startswith("_to")
            else "_to_copy"
        )
        in_place = func.overloadpacket.__name__.endswith("_")
        if name in SUMS and not in_place:
            args = tree_map(self._disturbed, args)
        result = func(*args, **(kwargs or {}))
        if name not in SUMS and name not in ROUNDED:
            return result
        if name in TAILS and isinstance(args[0], torch.Tensor) and args[0].is_floating_point():
            result = result + args[0] * self._noise(result, self.eps)
        if in_place:
            result.copy_(self._disturbed(result))
            return result
        return tree_map(self._disturbed, result)

    def _disturbed(self, x):
        """x off by up to an eps; values of a half's precision by that of theirs."""
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            return x
        eps = self.eps if x.dtype == torch.float64 else max(self.eps, torch.finfo(x.dtype).eps)
        if self.flushed and x.ndim and x.numel():
            small = x.abs() <= eps * x.abs().nan_to_num(0.0, 0.0).amax(-1, keepdim=True)
            if torch.rand(1, generator=self.generator) < 0.5:
                return torch.where(small, 0.0, x)
            x = torch.where(small & (self._noise(x, 1.0) > 0), 0.0, x)
        return torch.where(x.isinf(), x, x + x * self._noise(x, eps)).to(x.dtype)  # -inf - -inf is NaN

    def _noise(self, x, eps: float):
        return (eps * (2 * torch.rand(x.shape, generator=self.generator, dtype=torch.float64) - 1)).to(x.dtype)
