"""What rounding may do to a result: float64 with each operator's operands or result disturbed as rounding does it."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

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


class Rounding(TorchDispatchMode):
    """Disturbs results by up to one `eps` of relative error; what only moves or selects is exact."""

    def __init__(self, eps: float, seed: int):
        super().__init__()
        self.eps, self.generator = eps, torch.Generator().manual_seed(seed)

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
        return torch.where(x.isinf(), x, x + x * self._noise(x, eps)).to(x.dtype)  # -inf - -inf is NaN

    def _noise(self, x, eps: float):
        return (eps * (2 * torch.rand(x.shape, generator=self.generator, dtype=torch.float64) - 1)).to(x.dtype)
