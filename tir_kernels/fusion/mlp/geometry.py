"""Sizes of the CUDA kernel of two products: tiles, shared memory and registers of a configuration for a problem."""

from dataclasses import dataclass
from functools import cached_property

from tir_kernels.cuda.registers import resident_warps
from tir_kernels.cuda.shared_tiles import MMA_ROWS, PANEL, SharedTile
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import MAX_REGISTERS, GemmGeometry
from tir_kernels.fusion.problem import MlpProblem
from tir_kernels.fusion.steps import VECTOR, operand_words

BLOCK_K = 64  # of both products: what a stage holds of k
MAX_INNER = 512  # columns of the first product that a CTA holds in shared memory
MAX_INNER_TILE = 256  # columns of the first product whose accumulators a CTA has at a time


@dataclass(frozen=True)
class MlpConfig:
    """Tile sizes of one instance: a CTA of warps_m × warps_n warps owns block_m rows.

    It computes these rows of the first product whole, then those of the second block_n columns at a time, with
    `stages` blocks of a and w in shared memory.  The columns of the second product are cut into `parts` with a CTA
    each, and each of these CTAs computes the first product anew.  Parts are for few rows, when most of the GPU would be
    idle without them.
    """

    block_m: int
    block_n: int
    warps_m: int
    warps_n: int
    stages: int
    parts: int = 1

    @property
    def warps(self) -> int:
        return self.warps_m * self.warps_n

    @property
    def label(self) -> str:
        """The configuration as reports show it: "64x128 2x2 warps 4 stages 3 parts"."""
        text = f"{self.block_m}x{self.block_n} {self.warps_m}x{self.warps_n} warps {self.stages} stages"
        return text if self.parts == 1 else f"{text} {self.parts} parts"

    @property
    def symbol(self) -> str:
        """The tile sizes as part of a kernel's name."""
        sizes = (self.block_m, self.block_n, self.warps_m, self.warps_n, self.stages, self.parts)
        return "x".join(map(str, sizes))


@dataclass(frozen=True)
class SecondGeometry(GemmGeometry):
    """Geometry of the second product, whose a is `inner_tile` in shared memory at `inner_offset`.

    Its results are staged behind that tile, few at a time: the stages stay in use for the next tile.
    """

    inner_tile: SharedTile
    inner_offset: int

    @property
    def a_tile(self) -> SharedTile:
        return self.inner_tile

    @property
    def staging_offset(self) -> int:
        return self.inner_offset + self.inner_tile.size

    @property
    def staging_rows(self) -> int:
        return max(MMA_ROWS // 2, 32 * VECTOR // self.staging_columns)  # a vector for each lane

    @property
    def staging_columns(self) -> int:
        return min(self.warp_n, PANEL)


@dataclass(frozen=True)
class MlpGeometry:
    """The Python integers that the kernel's code is generated from."""

    problem: MlpProblem
    config: MlpConfig

    # -- the two products -----------------------------------------------------------------------------------------

    @cached_property
    def first(self) -> GemmGeometry:
        """Geometry of a tile of the first product; a CTA computes `inner_tiles` of them one after the other."""
        return GemmGeometry(self.problem.first, self._config_of(self.inner_width))

    @cached_property
    def second(self) -> SecondGeometry:
        config = self._config_of(self.config.block_n)
        return SecondGeometry(self.problem.second, config, self.inner_tile, self.inner_offset)

    def _config_of(self, block_n: int) -> GemmConfig:
        c = self.config
        return GemmConfig(c.block_m, block_n, BLOCK_K, c.warps_m, c.warps_n, c.stages)

    @property
    def inner_tiles(self) -> int:
        """Tiles of the first product next to each other."""
        return -(-self.problem.first.n // MAX_INNER_TILE)

    @property
    def inner_width(self) -> int:
        """Columns of one tile of the first product: whole blocks of the second product's k."""
        return -(-self.problem.first.n // (self.inner_tiles * BLOCK_K)) * BLOCK_K

    @property
    def tiles_per_part(self) -> int:
        """Tiles of the second product that a CTA computes; those of the last part may be fewer."""
        return -(-self.second.n_tiles // self.config.parts)

    @property
    def ctas(self) -> int:
        return self.first.m_tiles * self.config.parts

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.config.warps

    # -- shared memory: the stages, the rows of the first product, the way to the epilogue -------------------------

    @cached_property
    def inner_tile(self) -> SharedTile:
        """The CTA's rows of the first product; columns past its n are zeros."""
        return SharedTile(self.config.block_m, self.inner_tiles * self.inner_width, self.threads)

    @cached_property
    def w_tile(self) -> SharedTile:
        """A block of the second product's w."""
        return SharedTile(self.config.block_n, BLOCK_K, self.threads)

    @property
    def inner_offset(self) -> int:
        return self.config.stages * max(self.first.stage_bytes, self.w_tile.size)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory of a CTA."""
        return self.second.staging_offset + self.config.warps * self.second.staging_bytes

    # -- registers ------------------------------------------------------------------------------------------------

    @cached_property
    def registers(self) -> int:
        """Estimate of a thread's 32-bit registers: accumulators, fragments, operands and an observed number more."""
        return max(self._first_registers, self._second_registers)

    @property
    def _first_registers(self) -> int:
        g = self.first
        row_words, matrix_words = operand_words(g.problem.steps, g.problem.dtype)
        # An operand has two different words for two n8 tiles; a vector of the other epilogues has four.
        row_words = row_words // 2 * (g.col_tiles // 2)
        product = 2 * _fragment_words(g) + 28 + g.a_tile.passes + g.w_tile.passes
        return 4 * g.row_tiles * g.col_tiles + row_words + max(product, matrix_words + 40)

    @property
    def _second_registers(self) -> int:
        """Registers of the second product: with its epilogue in the loop, fragments and copy addresses stay live."""
        g, acc, copies = self.second, 4 * self.second.row_tiles * self.second.col_tiles, self.w_tile.passes
        row_words, matrix_words = operand_words(g.problem.steps, g.problem.dtype)
        epilogue = g.passes * matrix_words + 54
        rest = copies + row_words * g.column_parts + g.n_ends * copies + 4 * (g.m_ends or g.n_ends)
        rest += (acc // 8 + 8) * (g.k_blocks == 1)  # one block a tile: no branch separates the epilogue
        return acc + _fragment_words(g) + max(_fragment_words(g) + 28, epilogue) + rest

    @property
    def ctas_per_multiprocessor(self) -> int:
        """CTAs whose registers fit one multiprocessor, at most 16 warps; 0 where even one would spill."""
        if self.registers > MAX_REGISTERS:
            return 0
        warps = resident_warps(-(-self.registers // 8) * 8)
        return min(warps, 16) // self.config.warps


def _fragment_words(g: GemmGeometry) -> int:
    """Registers of a lane that one of the two sets of fragments takes."""
    return 4 * g.row_tiles + 2 * g.col_tiles


def legal(g: MlpGeometry, shared_limit: int) -> bool:
    """Whether tiles divide among warps and threads, and fit shared memory and registers."""
    tiles = (g.first.a_tile, g.first.w_tile, g.w_tile)
    divides = all(t.rows % min(t.rows, t.rows_per_pass) == 0 for t in tiles)
    return divides and g.shared_bytes <= shared_limit and g.ctas_per_multiprocessor > 0
