"""Sizes of the CUDA block-wise kernel: tiles, shared memory and registers of a configuration for a problem."""

from dataclasses import dataclass
from functools import cached_property

from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.attention.problem import AttentionProblem, View
from tir_kernels.cuda.float32.modes import fragment_words
from tir_kernels.cuda.registers import resident_warps
from tir_kernels.cuda.shared_tiles import MMA_COLS, MMA_ROWS, PanelTile, SharedTile, WordTile, chunk_elements

SAVED_BYTES = 32  # of shared memory, for values that only the end of a CTA needs


@dataclass(frozen=True)
class BlockWiseConfig:
    """Tile sizes of one instance: a CTA of `warps` warps owns block_m query rows and walks block_n keys at a time.

    `stages` K/V tiles are in shared memory at once.  One stage overlaps the copy of V with QKᵀ, and the copy of the
    next K with the softmax (FlashAttention-2); two and more copy whole blocks ahead.  The rows of a block and its keys
    are tokens that are `token_stride` apart (token_blocks.py).  `warpgroup`: products by Hopper's wgmma instead of
    mma.sync.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    token_stride: int = 1
    warpgroup: bool = False

    @property
    def label(self) -> str:
        """The configuration as reports show it: "64x64 4 warps 2 stages"."""
        text = f"{self.block_m}x{self.block_n} {self.warps} warps {self.stages} stages" + " wgmma" * self.warpgroup
        return text if self.token_stride == 1 else f"{text}, tokens {self.token_stride} apart"


@dataclass(frozen=True)
class Geometry(AttentionGeometry):
    """The Python integers that the kernel's code is generated from."""

    problem: AttentionProblem
    config: BlockWiseConfig

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.config.warps

    @property
    def ragged_q(self) -> bool:
        """Whether some block of rows holds less than block_m tokens."""
        return self.problem.q_len % (self.config.block_m * self.config.token_stride) != 0

    @property
    def ragged_kv(self) -> bool:
        """Whether some block of keys holds less than block_n tokens."""
        return self.problem.kv_len % (self.config.block_n * self.config.token_stride) != 0

    @property
    def skips_empty_rows(self) -> bool:
        """Whether a warp skips a partial block if none of the warp's rows keeps anything of it.

        Measured on an H200: 4 to 10 % less time for windows and global tokens with 16 rows a warp and heads of 64,
        up to 20 % more with heads of 128 or 32 rows a warp.
        """
        # Four warps execute a wgmma together, so none of them can skip it.
        return not self.config.warpgroup and self.row_tiles == 1 and self.head_dim <= 64 and self.v_head_dim <= 64

    # -- shared memory --------------------------------------------------------------------------------------------

    @cached_property
    def q_tile(self) -> SharedTile:
        return self._operand_tile(self.config.block_m, self.head_dim, self.threads, element_bytes=self.element_bytes)

    @cached_property
    def k_tile(self) -> SharedTile:
        return self._operand_tile(self.config.block_n, self.head_dim, self.threads, element_bytes=self.element_bytes)

    @cached_property
    def v_tile(self) -> SharedTile:
        if self.problem.dtype == "float32":
            return WordTile(self.config.block_n, self.v_head_dim, self.threads, element_bytes=self.element_bytes)
        return self._operand_tile(self.config.block_n, self.v_head_dim, self.threads)

    @property
    def _operand_tile(self):
        return PanelTile if self.config.warpgroup else SharedTile

    @cached_property
    def out_tile(self) -> SharedTile:
        """One warp's rows of the output, staged for 16-byte stores."""
        rows = self.config.block_m // self.config.warps
        return SharedTile(rows, self.v_head_dim, 32, element_bytes=self.element_bytes)

    @property
    def kv_offset(self) -> int:
        """Bytes before the first stage: q, whose rows each warp later overwrites with its own output."""
        return max(self.q_tile.size, self.config.warps * self.out_tile.size)

    @property
    def stage_bytes(self) -> int:
        """Bytes of shared memory that a stage takes: one block of k and one of v."""
        return self.k_tile.size + self.v_tile.size

    @property
    def saved_offset(self) -> int:
        """Offset of `SAVED_BYTES`, what the end of the kernel needs: where the CTA's result goes, and its sink."""
        return self.kv_offset + self.config.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.saved_offset + SAVED_BYTES

    # -- registers ------------------------------------------------------------------------------------------------

    def _registers(self, with_q: bool) -> int:
        """Estimate of a thread's 32-bit registers: accumulators, fragments, and a measured number for the rest."""
        scores, out = 4 * self.score_tiles * self.row_tiles, 4 * self.value_tiles * self.row_tiles
        rest = 44 + 8 * (self.config.stages == 1) + 4 * (self.config.warps == 8)
        rest += 8 * (self.ragged_q or self.ragged_kv)
        rest += 16 * (self.config.warpgroup and self.config.block_n >= 128)  # packed probabilities beside the scores
        rest += 4 * (self.problem.gives_lse and self.config.token_stride > 1)
        rest += 4 * (self.problem.block_map is not None)
        rest += 4 * self.problem.has_key_count
        rest += 4 * (self.head_dim != self.v_head_dim)  # K and V then lie at different offsets
        if self.problem.dtype == "float32":
            rest += fragment_words(self.problem.float32, self.row_tiles)
        return scores + out + 4 * self.query_steps * self.row_tiles * with_q + 4 * self.row_tiles + rest

    def _spills_all_the_same(self) -> bool:
        """Whether ptxas spills although the estimate fits: copies between the three products of "ieee" and barriers."""
        exact = self.problem.dtype == "float32" and self.problem.float32 == "ieee"
        return exact and self.config.stages == 1 and self.config.warps > 1

    @property
    def q_in_registers(self) -> bool:
        """Whether q's fragments are loaded once; else they are read from shared memory for every block."""
        # ptxas takes the parts of fragments that do not change out of the loop over blocks: three registers for each.
        if self.config.warpgroup or (self.problem.dtype == "float32" and self.problem.float32 == "ieee"):
            return False
        return self._registers(with_q=True) <= 232

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs whose registers fit one multiprocessor; 0 where even one would spill."""
        if self._spills_all_the_same():
            return 0
        registers = self._registers(with_q=self.q_in_registers)
        return resident_warps(registers) // self.config.warps if registers <= 240 else 0


def partial_shape(problem: AttentionProblem, block_m: int) -> tuple[int, int, int]:
    """Shape of one partial result in floats: (n8 tiles of v + 1, 2 * block_m lanes, 4), whatever the number of warps.

    The layout is that of the threads' registers, so a thread of another CTA reads what the same thread wrote, 16 bytes
    at a time: the accumulators of each m16n8 tile, then the two rows' maxima and the lane's share of their sums.
    """
    value_tiles = -(-problem.v_head_dim // MMA_ROWS) * (MMA_ROWS // MMA_COLS)
    return value_tiles + 1, 2 * block_m, 4


def unaligned(problem: AttentionProblem) -> str | None:
    """Why rows of an input cannot be copied 16 bytes at a time, or None."""
    chunk = chunk_elements(problem.dtype)
    for name in ("head_dim", "v_head_dim"):
        if getattr(problem, name) % chunk:
            return f"{name}={getattr(problem, name)} must be a multiple of {chunk}: rows are copied 16 bytes at a time"
    for name, view in problem.layouts._asdict().items():
        if isinstance(view, View) and any(n % chunk for n in view[1:]):
            return f"{name} is a {view}: offset and strides must be multiples of {chunk}, the elements of 16 bytes"
    return None
