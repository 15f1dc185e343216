"""PyTorch's scaled_dot_product_attention: with the mask, and dense or causal on one pinned back-end.

Every call is watched once by a dispatch mode, so that the variant names the operator that really ran; a pinned back-end
that did not run is an error.
"""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.system import Prepared

BACKENDS = {
    "fa2": (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
}


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """RuntimeError where the back-end refuses the case or another one runs."""
    gqa = case.heads != case.kv_heads
    if system == "sdpa-mask":
        mask, expected = pattern.dense, None

        def call(q, k, v):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
    else:
        name, _, causal = system.partition("-")
        backend, expected = BACKENDS[name]

        def call(q, k, v):
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=bool(causal), enable_gqa=gqa)

    ran = operators(lambda: call(*example_inputs(case, device)))
    if expected is not None and not any(name.startswith(expected) for name in ran):
        raise RuntimeError(f"{system} was asked of PyTorch, but it ran {', '.join(ran) or 'no fused operator'}")
    return Prepared(call, f"torch {torch.__version__} {' '.join(ran) or 'unfused'}")


def example_inputs(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """q, k, v with the case's shapes, uninitialised."""
    dtype = getattr(torch, case.dtype)
    return tuple(
        torch.empty((case.batch, heads, length, case.head_dim), dtype=dtype, device=device)
        for heads, length in ((case.heads, case.q_len), (case.kv_heads, case.kv_len), (case.kv_heads, case.kv_len))
    )


def operators(call) -> list[str]:
    """Names of the fused attention operators that a call dispatches to."""
    with _Operators() as mode:
        call()
    return mode.names


class _Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).removeprefix("aten.").partition(".")[0]
        if "scaled_dot_product" in name and name not in self.names:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
