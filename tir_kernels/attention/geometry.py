"""What the geometries of all CUDA attention kernels have in common: the fragments of a warp's rows."""

from typing import Any

from tvm.script import tirx as T

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES, MMA_COLS, MMA_ROWS, STEP_BYTES, element_bytes


class AttentionGeometry:
    """Sizes of the fragments that a warp holds.  What a subclass has besides:

    `config` with block_m, block_n and token_stride; `threads`, those that compute a block of rows; the tiles of shared
    memory, of which `out_tile` is the layout in which a warp's rows of the output are staged for 16-byte stores.
    """

    problem: AttentionProblem
    config: Any
    threads: Any
    q_tile: Any
    k_tile: Any
    v_tile: Any
    out_tile: Any
    shared_bytes: Any
    ctas_per_multiprocessor: Any
    skips_empty_rows: Any = False  # whether a warp leaves out a partial block that keeps nothing of its rows
    leading_rows: Any = 0  # rows of the first block row that lie before the first token

    def has_row(self, row):
        """Whether a row of a block row is a token's: it may lie past the last, or before the first."""
        if self.leading_rows:
            # A negative row is a large number.
            return T.cast(row, "uint32") < T.uint32(self.problem.q_len)
        return row < self.problem.q_len

    def row_of_token(self, row):
        """The row where it is a token's, else the last token's."""
        last = self.problem.q_len - 1
        if self.leading_rows:
            return T.cast(T.min(T.cast(row, "uint32"), T.uint32(last)), "int32")
        return T.min(row, last)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of q, k, v and the output."""
        return element_bytes(self.problem.dtype)

    @property
    def head_dim(self) -> int:
        """Head size of q and k inside the kernel, padded to the depth of an mma."""
        return -(-self.problem.head_dim // MMA_ROWS) * MMA_ROWS

    @property
    def v_head_dim(self) -> int:
        """Head size of v and the output inside the kernel, padded to the depth of an mma."""
        return -(-self.problem.v_head_dim // MMA_ROWS) * MMA_ROWS

    @property
    def row_tiles(self) -> int:
        """m16 tiles of query rows that a warp owns."""
        return self.config.block_m * 32 // (MMA_ROWS * self.threads)

    @property
    def score_tiles(self) -> int:
        """n8 tiles across a block's keys."""
        return self.config.block_n // MMA_COLS

    @property
    def value_tiles(self) -> int:
        """n8 tiles across the value head."""
        return self.v_head_dim // MMA_COLS

    @property
    def query_steps(self) -> int:
        """Steps of QKᵀ: k16, or k8 of float32."""
        return self.head_dim * self.element_bytes // STEP_BYTES

    @property
    def copied_elements(self) -> int:
        """What it costs to copy one token's key and value, in elements of 16 bits."""
        return (self.head_dim + self.v_head_dim) * self.element_bytes // ELEMENT_BYTES

    @property
    def keep_words(self) -> int:
        """32-bit words that hold a lane's keep bits of one m16 tile: 4 bits an n8 tile."""
        return -(-self.score_tiles * 4 // 32)
