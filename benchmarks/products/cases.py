"""The products that are measured: those of `shapes.py`, and how each is given to the templates."""

from dataclasses import asdict, dataclass, replace

from benchmarks.products.shapes import SHAPES
from tir_kernels.fusion.problem import GemmProblem, Step

TINY_ROWS, TINY_COLUMNS, TINY_DEPTH = 16, 64, 32


@dataclass(frozen=True, order=True)
class ProductCase:
    """a (m, k) times w, and a bias (n,) if there is one; `w_layout`, `batch` and `matrices` as in GemmProblem."""

    m: int
    n: int
    k: int
    bias: bool = False
    w_layout: str = "nk"
    batch: int = 1
    matrices: int = 1
    dtype: str = "float16"

    @property
    def label(self) -> str:
        """Such as "4096x3072x768 float16 + bias", or "49152x64x768 float16 kn, 12 parts by 12 matrices"."""
        text = f"{self.m}x{self.n}x{self.k} {self.dtype}" + (" + bias" if self.bias else "")
        if self.w_layout != "nk":
            text += f" {self.w_layout}"
        return text + (f", {self.batch} parts by {self.matrices} matrices" if self.batch > 1 else "")

    @property
    def problem(self) -> GemmProblem:
        steps = (Step("add", "row"),) * self.bias
        more = {"w_layout": self.w_layout, "batch": self.batch, "matrices": self.matrices}
        return GemmProblem(self.m, self.n, self.dtype, steps, k=self.k, **more)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Inputs and output, each once."""
        return 2 * (self.m * self.k + self.matrices * self.n * self.k + self.m * self.n + self.n * self.bias)

    @staticmethod
    def from_row(row: dict) -> "ProductCase":
        return ProductCase(**row["case"])

    def to_json(self) -> dict:
        """The `case` object of a result row."""
        return asdict(self)


def product_cases() -> list[ProductCase]:
    """All, sorted."""
    return sorted(ProductCase(*shape) for shape in SHAPES)


def tiny(case: ProductCase) -> ProductCase:
    """At a size for a CPU; columns stay as far from a multiple of 8 as they are."""
    matrices = min(case.matrices, 2)
    batch = 2 * matrices if case.batch > case.matrices else matrices
    columns = case.n if case.n <= TINY_COLUMNS else TINY_COLUMNS + case.n % 8
    sizes = {"m": batch * TINY_ROWS, "n": columns, "k": min(case.k, TINY_DEPTH)}
    return replace(case, **sizes, batch=batch, matrices=matrices)
