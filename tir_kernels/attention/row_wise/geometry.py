"""Sizes of the CUDA row-wise kernel: tiles of query rows and tokens, partial results, shared memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.shared_tiles import MMA_ROWS, SharedTile

TOKENS = 16  # tokens that a warp gathers and multiplies at a time: the depth of an mma of P·V
STATISTICS = 8  # floats that end a row of a partial result: its maximum, its sum, and padding


@dataclass(frozen=True)
class RowWiseConfig:
    """A CTA of `warps` warps; each keeps `stages` tiles of 16 gathered tokens in its own shared memory.

    block_m and block_n are the block size of the mask that is read.  They do not change the work, since the kernel
    regroups the tokens, but a pattern must be one block row.
    """

    warps: int
    stages: int
    block_m: ClassVar[int] = MMA_ROWS
    block_n: ClassVar[int] = 64
    token_stride: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """The configuration as reports show it: "row-wise 4 warps 2 stages"."""
        return f"row-wise {self.warps} warps {self.stages} stages"


@dataclass(frozen=True)
class RowWiseGeometry:
    """The Python integers that the kernel's code is generated from.

    The rows of one key/value head are its query heads' rows, head after head: row r is query r % q_len of query
    head r // q_len of the group.  16 of them are a row tile, computed together so that they share every load.
    """

    problem: AttentionProblem
    config: RowWiseConfig

    @cached_property
    def warp(self) -> Geometry:
        """Sizes of one warp on one tile of tokens: those of the block-wise kernel with one warp and 16×16 blocks."""
        return Geometry(self.problem, BlockWiseConfig(MMA_ROWS, TOKENS, 1, self.config.stages))

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.config.warps

    @property
    def rows(self) -> int:
        """Query rows that read one key/value head."""
        return rows_of_kv_head(self.problem)

    @property
    def n_row_tiles(self) -> int:
        """Tiles of query rows that read one key/value head."""
        return row_tiles_of_kv_head(self.problem)

    @property
    def n_units(self) -> int:
        """Units: the row tiles of all key/value heads.  The splits of a unit are merged."""
        return self.problem.batch * self.problem.kv_heads * self.n_row_tiles

    @property
    def record_shape(self) -> tuple[int, int]:
        """(rows, floats a row) of a partial result; see the function `record_shape`."""
        return record_shape(self.problem)

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs whose registers fit one multiprocessor."""
        return self.warp.ctas_per_multiprocessor // self.config.warps

    # -- shared memory: the queries, each warp's stages (later its partial result), the arrival flag ----------------

    @cached_property
    def q_tile(self) -> SharedTile:
        """The CTA's queries, copied by all its threads."""
        return SharedTile(MMA_ROWS, self.warp.head_dim, self.threads, element_bytes=self.warp.element_bytes)

    @property
    def warp_bytes(self) -> int:
        """Bytes of shared memory of a warp: a multiple of 128, because swizzled addresses are XORed."""
        rows, pitch = self.record_shape
        return -(-max(self.config.stages * self.warp.stage_bytes, rows * pitch * 4) // 128) * 128

    @property
    def arrival_offset(self) -> int:
        """Offset of the arrival flag: how many splits of the CTA's unit arrived before it."""
        return self.q_tile.size + self.config.warps * self.warp_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.arrival_offset + 16


def rows_of_kv_head(problem: AttentionProblem) -> int:
    """Query rows that share one key/value head: q_len of each query head of its group."""
    return problem.group * problem.q_len


def row_tiles_of_kv_head(problem: AttentionProblem) -> int:
    """Tiles of `MMA_ROWS` rows that hold the rows of one key/value head; the last may be filled in part."""
    return -(-rows_of_kv_head(problem) // MMA_ROWS)


def record_shape(problem: AttentionProblem) -> tuple[int, int]:
    """(rows, floats a row) of a partial result: the unnormalized output, then maximum and sum.

    The 8 floats past a multiple of 16 also keep 8-byte stores of an mma accumulator free of bank conflicts.
    """
    v_head_dim = -(-problem.v_head_dim // MMA_ROWS) * MMA_ROWS
    return min(MMA_ROWS, rows_of_kv_head(problem)), v_head_dim + STATISTICS
