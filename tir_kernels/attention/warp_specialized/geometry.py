"""Sizes of the warp-specialized kernel: tiles, shared memory and registers of a configuration for a problem."""

from dataclasses import dataclass
from functools import cached_property

from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.warp_specialized.work import Item
from tir_kernels.cuda.device import GPU, H200, WARP
from tir_kernels.cuda.registers import MAX_TRADED, PRODUCER_THREADS, consumer_registers
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES, MMA_COLS, MMA_ROWS, PANEL, PanelRows, PanelTile

WARPGROUP = 128  # threads
WARPGROUP_ROWS = 64  # of one wgmma
UNALIGNED_ROWS = 192  # of a block row that may begin before the first token
PRODUCER_REGISTERS = 32
BARRIER_BYTES = 8
WORD_BYTES = 4
ITEM_BYTES = len(Item) * WORD_BYTES
FLAG_BYTES = 16


def stored_dim(dim: int) -> int:
    """Elements of a row of a tile for heads of `dim`: a whole number of panels of 64, or one of 32 or 16.

    A row of a panel takes as long to copy as 64 elements, however narrow it is, so the last panel is as wide as the
    others.  What it has beyond the head arrives as zeros, is not read from memory, and not multiplied beyond a multiple
    of 16.
    """
    panel = next((width for width in (16, 32) if dim <= width), PANEL)
    return -(-dim // panel) * panel


@dataclass(frozen=True)
class WarpSpecializedConfig:
    """Tile sizes of one instance: a warpgroup for each 64 of block_m query rows, `together` blocks of block_n keys.

    A tile of keys holds `together` listed blocks, which need not be neighbours: narrow blocks are multiplied as fast as
    wide ones.  `stages` tiles of K, and as many of V, are in shared memory at once.  The rows of a block and its keys
    are tokens that are `token_stride` apart (token_blocks.py).
    """

    block_m: int
    block_n: int
    stages: int
    together: int = 1
    token_stride: int = 1

    @property
    def tile_n(self) -> int:
        """Keys of a tile."""
        return self.block_n * self.together

    @property
    def label(self) -> str:
        """The configuration as reports show it: "128x128 2 warpgroups 2 stages"."""
        keys = str(self.block_n) if self.together == 1 else f"({self.together}*{self.block_n})"
        text = f"{self.block_m}x{keys} {self.block_m // WARPGROUP_ROWS} warpgroups {self.stages} stages"
        return text if self.token_stride == 1 else f"{text}, tokens {self.token_stride} apart"


@dataclass(frozen=True)
class Geometry(AttentionGeometry):
    """The Python integers that the kernel's code is generated from."""

    problem: AttentionProblem
    config: WarpSpecializedConfig

    @property
    def warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.config.block_m // WARPGROUP_ROWS

    @property
    def threads(self) -> int:
        """Threads that compute."""
        return WARPGROUP * self.warpgroups

    @property
    def cta_threads(self) -> int:
        """Threads of a CTA: those that compute, and a warpgroup of which one thread copies."""
        return self.threads + PRODUCER_THREADS

    @property
    def leading_rows(self) -> int:
        """Rows of the first block row that lie before the first token, a multiple of a warpgroup's.

        With them the last block row ends where the sequence does.  Under a causal mask the rows that are computed for
        nothing are then those of the shortest block row, not of the longest.

        Block rows of 128 begin where blocks of keys, and often a mask's own blocks, begin: 64 rows before that, each
        would have the tiles of two.  Those of 192 meet them anyhow.  Block rows that are listed on the device begin at
        the first token, and so do those of tokens that are apart.
        """
        apart = self.config.token_stride > 1
        if self.config.block_m != UNALIGNED_ROWS or self.problem.block_map is not None or apart:
            return 0
        needed = -(-self.problem.q_len // WARPGROUP_ROWS)  # warpgroups
        return -needed % self.warpgroups * WARPGROUP_ROWS

    @property
    def score_tiles(self) -> int:
        """n8 tiles across a tile's keys."""
        return self.config.tile_n // MMA_COLS

    # -- shared memory --------------------------------------------------------------------------------------------

    @cached_property
    def q_tile(self) -> PanelTile:
        return PanelTile(self.config.block_m, stored_dim(self.head_dim), self.threads)

    @cached_property
    def k_tile(self) -> PanelTile:
        return PanelTile(self.config.tile_n, stored_dim(self.head_dim), self.threads)

    @cached_property
    def v_tile(self) -> PanelTile:
        return PanelTile(self.config.tile_n, stored_dim(self.v_head_dim), self.threads)

    @cached_property
    def out_tile(self) -> PanelRows:
        """One warp's rows of the output, staged for 16-byte stores where the warp's queries were."""
        return PanelRows(MMA_ROWS, stored_dim(self.v_head_dim), WARP, self.config.block_m)

    @property
    def q_bytes(self) -> int:
        """Bytes of a stage of queries, in which the output is staged later."""
        return self.config.block_m * max(self.q_tile.dim, self.out_tile.dim) * ELEMENT_BYTES

    @property
    def block_words(self) -> int:
        """32-bit words that hold a lane's keep bits of one m16 tile of a listed block."""
        return -(-self.config.block_n // (8 * MMA_COLS))

    @property
    def block_keep_bytes(self) -> int:
        """Bytes of the keep bits of a partial block."""
        return self.config.block_m // MMA_ROWS * WARP * self.block_words * WORD_BYTES

    @property
    def keep_bytes(self) -> int:
        """Bytes of the keep bits of a tile with partial blocks."""
        return self.config.together * self.block_keep_bytes

    @cached_property
    def q_stages(self) -> int:
        """Stages of queries: 2 where they fit.

        With 2, the next item's queries arrive, and its first scores are computed, before this item's output is stored.
        """
        return 2 if self._shared_bytes(2) <= H200.block_shared_bytes else 1

    @property
    def k_offset(self) -> int:
        """Bytes before the ring of K, after that of Q."""
        return self.q_stages * self.q_bytes

    @property
    def v_offset(self) -> int:
        return self.k_offset + self.config.stages * self.k_tile.size

    @property
    def keep_offset(self) -> int:
        """Bytes before the ring of keep bits, which has a stage for each of K's."""
        return self.v_offset + self.config.stages * self.v_tile.size

    @property
    def item_offset(self) -> int:
        """Where the thread that copies leaves the fields of items to those that compute, in a stage for each of Q's."""
        return self.keep_offset + self.config.stages * self.keep_bytes

    @property
    def flag_offset(self) -> int:
        """Where the first thread of each warpgroup tells the others whether theirs is the last result of a row."""
        return self.item_offset + self.q_stages * ITEM_BYTES

    @property
    def barrier_offset(self) -> int:
        return self.flag_offset + FLAG_BYTES

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self._shared_bytes(self.q_stages)

    def _shared_bytes(self, q_stages: int) -> int:
        stages = self.config.stages
        rings = q_stages * self.q_bytes + stages * (self.k_tile.size + self.v_tile.size + self.keep_bytes)
        return rings + q_stages * ITEM_BYTES + FLAG_BYTES + 2 * (2 * stages + q_stages) * BARRIER_BYTES

    @property
    def copied_elements(self) -> int:
        """What it costs to copy one token's key and value: a row of a panel counts as 64 elements."""
        return (self.k_tile.panels + self.v_tile.panels) * PANEL

    # -- registers ------------------------------------------------------------------------------------------------

    @property
    def registers(self) -> int:
        """Estimate of the registers of a thread that computes: accumulators, probabilities, and a measured rest."""
        scores, out = 4 * self.score_tiles, 4 * self.value_tiles
        wide = out + self.problem.has_key_count > 96
        rest = 32 + 34 * (self.problem.bias_shape is not None) + 34 * (self.config.stages > 2 and wide)
        rest += 8 * (self.problem.softcap is not None and self.problem.has_key_count)
        return scores + out + scores // 2 + rest

    @cached_property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs that share a multiprocessor; 0 where not even one has the registers or the shared memory."""
        fits = H200.ctas_that_share(self.shared_bytes) if self.shared_bytes <= H200.block_shared_bytes else 0
        while fits and self.registers > self.registers_at(fits):
            fits -= 1
        return fits

    @property
    def chooses_maps(self) -> bool:
        """Whether an operand has two maps: a token stride does not divide its length (producer.py)."""
        return any(length % self.config.token_stride for length in (self.problem.q_len, self.problem.kv_len))

    def grid_size(self, gpu: GPU) -> int:
        """CTAs of the grid: as many as run at once."""
        return self.ctas_per_multiprocessor * gpu.multiprocessors

    def registers_at(self, ctas: int) -> int:
        """Registers that a thread that computes may have if `ctas` CTAs share a multiprocessor."""
        return consumer_registers(self.cta_threads, ctas, PRODUCER_REGISTERS)

    @property
    def trades_registers(self) -> bool:
        """Whether the threads that copy give registers to those that compute."""
        return self.cta_threads * self.ctas_per_multiprocessor * MAX_TRADED > H200.registers
