"""The assignment of a matrix's rows to threads: the row kernels' configurations and sizes.

`threads_per_row` threads hold one row in registers, in vectors of 8 neighbours.  Vector v of thread t is the row's
vector v * threads_per_row + t, so a warp reads contiguous memory.
"""

from dataclasses import dataclass

from tvm.script import tirx as T

from tir_kernels.cuda.device import GPU, WARP
from tir_kernels.fusion.problem import RowProblem
from tir_kernels.fusion.steps import VECTOR

STATISTICS_BYTES = 8  # two float32 of a warp
THREADS_PER_ROW = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
USUAL_VECTORS = 4  # of a thread, unless the row is too wide
MAX_VECTORS = 8
MAX_COLUMNS = VECTOR * MAX_VECTORS * THREADS_PER_ROW[-1]
MAX_WASTE = 8  # at most one vector in MAX_WASTE may lie past the end of the row
CTA_THREADS = (128, 256)
RESIDENT_THREADS = {1: 2048, 2: 1152, 3: 1024, 4: 768}  # vectors of a thread -> threads whose registers fit
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class RowConfig:
    """Threads of a row, and rows that a CTA works on side by side."""

    threads_per_row: int
    rows_per_cta: int

    @property
    def label(self) -> str:
        """The configuration as reports show it: "8 rows of 32 threads"."""
        return f"{self.rows_per_cta} rows of {self.threads_per_row} threads"


class RowGeometry:
    """What follows from a matrix (m, n) and a configuration."""

    def __init__(self, m: int, n: int, config: RowConfig):
        self.m, self.n, self.config = m, n, config
        self.vectors = n // VECTOR  # of a row
        # The last vector of a thread may lie past the end of the row.
        self.vectors_per_thread = -(-self.vectors // config.threads_per_row)
        self.warps_per_row = -(-config.threads_per_row // WARP)
        self.threads = config.threads_per_row * config.rows_per_cta
        self.ctas = -(-m // config.rows_per_cta)
        self.rows_end = m % config.rows_per_cta != 0  # whether the last CTA has fewer rows
        self.row_bytes = self.warps_per_row * STATISTICS_BYTES
        self.shared_bytes = config.rows_per_cta * self.row_bytes

    def always_inside(self, v: int) -> bool:
        """Whether vector v of every thread exists."""
        return (v + 1) * self.config.threads_per_row <= self.vectors

    def column(self, v: int, row_lane):
        """First column of vector v of thread `row_lane` of a row; of the row's last vector if v lies past the end."""
        vector = row_lane + v * self.config.threads_per_row
        return (vector if self.always_inside(v) else T.min(vector, self.vectors - 1)) * VECTOR

    def elements_of_warp(self, warp):
        """How many elements of a row its `warp`-th warp holds."""
        if self.warps_per_row == 1:
            return self.n
        full, left = divmod(self.vectors, self.config.threads_per_row)
        if not left:
            return full * WARP * VECTOR
        low, high = (min, max) if isinstance(warp, int) else (T.min, T.max)
        return (full * WARP + high(low(left - warp * WARP, WARP), 0)) * VECTOR


def row_configs(m: int, n: int, gpu: GPU, gathers: bool = False, matrices: int = 1) -> list[RowConfig]:
    """Configurations that hold a row of n columns in registers; the one expected to be the fastest first.

    A kernel that `gathers` waits for indices before it reads, so each thread should have more loads under way.  A
    kernel that reads several `matrices` (m, n) keeps that many vectors of each row in registers.
    """
    vectors = n // VECTOR
    # So few threads that every warp has a part of the row.
    enough = [
        t for t in THREADS_PER_ROW if t * USUAL_VECTORS >= vectors and (t < min(2 * vectors, vectors + WARP) or t == 1)
    ]
    tight = [t for t in enough if -vectors % t * MAX_WASTE <= vectors]
    found = [
        RowConfig(threads, rows)
        for threads in tight or enough or THREADS_PER_ROW[-1:]
        for rows in {max(1, CTA_THREADS[0] // threads), -(-CTA_THREADS[0] // threads), -(-CTA_THREADS[1] // threads)}
        if threads * rows % WARP == 0
    ]
    return sorted(found, key=lambda config: _rank(RowGeometry(m, n, config), gpu, gathers, matrices))


def _rank(g: RowGeometry, gpu: GPU, gathers: bool, matrices: int):
    """A sort key: the configuration that should be the fastest, as seen on an H200, comes first.

    It prefers as many threads a row as run at once, up to 256, and CTAs of 128 threads unless they leave some
    multiprocessors idle.
    """
    threads = g.config.threads_per_row
    each = min(RESIDENT_THREADS.get(matrices * g.vectors_per_thread, CTA_THREADS[0]), gpu.threads)
    resident = each * gpu.multiprocessors
    wanted = CTA_THREADS[0] if g.ctas >= 2 * gpu.multiprocessors else 1
    waits = g.m * threads > resident
    return (
        threads > CTA_THREADS[1],
        waits,
        -g.vectors_per_thread if waits and gathers else g.vectors_per_thread,
        g.threads < wanted,
        g.threads,
    )


def refusal(m: int, n: int) -> str | None:
    """Why a matrix (m, n) cannot be worked on in rows, or None."""
    if n % VECTOR:
        return f"n={n} must be a multiple of {VECTOR}: rows are read 16 bytes at a time"
    if n > MAX_COLUMNS:
        return f"n={n} is more than the {MAX_COLUMNS} columns that a CTA holds in registers"
    if m * n > MAX_INT32:
        return f"{m} rows of {n} are 2^31 elements or more; indices are 32-bit"
    return None


def steps_refusal(problem: RowProblem, max_operands: int) -> str | None:
    """Why the steps of `problem` cannot be computed, or None."""
    if len(problem.operand_shapes) > max_operands:
        return f"{len(problem.operand_shapes)} operands of steps and norm, more than {max_operands}"
    return None
