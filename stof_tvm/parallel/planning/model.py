"""The sizes of a Transformer whose layers are planned, and what its products take on a GPU."""

from dataclasses import dataclass

import tvm

from tir_kernels.attention.problem import MAX_HEAD_DIM
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.float32.modes import mma_time
from tir_kernels.cuda.shared_tiles import chunk_elements
from tir_kernels.errors import InputError

RATE = 2.45e6  # multiply-adds of a multiprocessor in a µs: a 7B decoder at 2048 tokens in 41 ms on an H200
PASSES = 4  # over the tokens of a residual sum and its norm: product and stream are read, stream and norm written
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class PlannedModel:
    """A Transformer of equal layers, of which attention and products are planned.

    Attributes
    ----------
    length, batch, layers, q_heads, kv_heads, head_dim : int
    hidden : int
        Width of the residual stream.
    intermediate : int
        Width inside the MLP; 0 without one.
    gated : bool
        Whether the MLP has two matrices up instead of one.
    dtype : str

    Raises InputError for heads that no kernel computes.
    """

    length: int
    batch: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    gated: bool
    dtype: str

    def __post_init__(self):
        if self.q_heads % self.kv_heads:
            raise InputError(f"heads={self.q_heads} must be a multiple of kv-heads={self.kv_heads}")
        if self.head_dim > MAX_HEAD_DIM:
            raise InputError(f"head-dim={self.head_dim} is more than {MAX_HEAD_DIM}, the largest of the kernels")
        if self.head_dim % (chunk := chunk_elements(self.dtype)):
            raise InputError(
                f"head-dim={self.head_dim} must be a multiple of {chunk}: kernels copy rows of {self.dtype} 16 bytes "
                "at a time"
            )

    @property
    def element_bytes(self) -> int:
        """Bytes of an element."""
        return BYTES[self.dtype]

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.q_heads + self.kv_heads)
        return attention + self.hidden * self.intermediate * (3 if self.gated else 2)

    def products_us(self, tokens: int, share: float, target: tvm.target.Target) -> float:
        """Predicted microseconds of a layer's products on a GPU that has some tokens and a share of the weights.

        The slower of multiplying, at the rate of a measured model, and of reading the weights once.
        """
        gpu = gpu_of(target)
        weights = self.weights * share
        multiplying = weights * tokens * mma_time(self.dtype, "ieee") / (RATE * gpu.multiprocessors)
        return max(multiplying, weights * self.element_bytes / gpu.bandwidth)

    def norms_us(self, tokens: int, target: tvm.target.Target) -> float:
        """Predicted microseconds of a layer's two residual sums with their norms: the time of moving their tokens."""
        return 2 * PASSES * tokens * self.hidden * self.element_bytes / gpu_of(target).bandwidth
