"""PyTorch without the fast paths whose results differ from its own definition where values are not finite.

Examples: the CPU's flash attention gives 0 for scores of NaN, nn.TransformerEncoderLayer's fast path gives NaN for a
row that is wholly masked.  Sorts keep the order of equal numbers (stable_order.py).
"""

import contextlib
import contextvars
import threading

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from stof_tvm.verification.stable_order import StableOrder

# Set where a model's results are what an engine is compared with: they must not be of the same kernels.
by_pytorch = contextvars.ContextVar("by_pytorch", default=False)
_LOCK = threading.RLock()  # the switches are global to the process


@contextlib.contextmanager
def plain_pytorch():
    """A context where scaled dot product attention follows its definition and modules use their ordinary forward."""
    with _LOCK:
        was_enabled = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with sdpa_kernel(SDPBackend.MATH), StableOrder():
                yield
        finally:
            torch.backends.mha.set_fastpath_enabled(was_enabled)
