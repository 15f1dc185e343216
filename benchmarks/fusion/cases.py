"""The fused computations that are measured: products with epilogues, norms of rows, products with norms, adapters."""

from dataclasses import asdict, dataclass, replace

from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step

BIAS, RESIDUAL, GELU = Step("add", "row"), Step("add", "matrix"), Step("gelu")
LAYER_NORM = Norm("layer_norm", 1e-5)
LENGTHS = (128, 512, 2048, 4096, 32768)
SHORT = (128, 512, 2048)  # of these, where a launch and a part of a wave count
FEW = (1, 2, 4, 8, 16)  # decoding
# (n, k) of the first product of a feed-forward network.
BERT = ((3072, 768), (4096, 1024))
LLAMA = ((2816, 1024), (11008, 4096))
NORMS = (768, 1024, 4096)
# (n, k) of the products that a norm follows: of attention's output, of the feed-forward network.
NORMED = ((768, 768), (768, 3072), (1024, 1024), (1024, 4096))
# (n = k, inner) of two products one after the other, as adapters and small feed-forward networks have them.
MLPS = ((768, 64), (1024, 128), (256, 512), (768, 256))


@dataclass(frozen=True, order=True)
class FusionCase:
    """`template` is "gemm-gelu" (a w + bias, GELU), "residual-norm" (x + bias + residual, LayerNorm; k is 0),
    "gemm-norm" (a w + bias + residual, LayerNorm), or "mlp" (GELU(a w + bias) v + bias + a, `inner` between)."""

    template: str
    m: int
    n: int
    k: int
    dtype: str = "float16"
    inner: int = 0

    @property
    def label(self) -> str:
        if self.inner:
            return f"{self.template} {self.m}x{self.k}x{self.inner}x{self.n}"
        return f"{self.template} {self.m}x{self.n}" + (f"x{self.k}" if self.k else "")

    @property
    def problem(self) -> RowProblem | MlpProblem:
        if self.template == "mlp":
            return MlpProblem(*self.unfused)
        if self.template == "gemm-gelu":
            return GemmProblem(self.m, self.n, self.dtype, (BIAS, GELU), k=self.k)
        if self.template == "residual-norm":
            return RowProblem(self.m, self.n, self.dtype, (BIAS, RESIDUAL), LAYER_NORM)
        return GemmProblem(self.m, self.n, self.dtype, (BIAS, RESIDUAL), LAYER_NORM, k=self.k)

    @property
    def unfused(self) -> list[RowProblem]:
        """Two kernels that do the same: the product with its elementwise steps, then the norm or product of that."""
        if self.template == "mlp":
            first = GemmProblem(self.m, self.inner, self.dtype, (BIAS, GELU), k=self.k)
            return [first, GemmProblem(self.m, self.n, self.dtype, (BIAS, RESIDUAL), k=self.inner)]
        product = GemmProblem(self.m, self.n, self.dtype, (BIAS, RESIDUAL), k=self.k)
        return [product, RowProblem(self.m, self.n, self.dtype, (), LAYER_NORM)]

    @property
    def input_shapes(self) -> list[tuple[int, ...]]:
        """In the order of the kernels' arguments, each once."""
        shapes = [shape for shape, _ in self.problem.inputs]
        return shapes[:-1] if self.template == "mlp" else shapes

    def arguments(self, inputs) -> tuple:
        """The kernels' of a set of inputs: the residual of an adapter is its a."""
        return (*inputs, inputs[0]) if self.template == "mlp" else tuple(inputs)

    @property
    def bytes_moved(self) -> int:
        """Inputs and output, each once."""
        return 2 * (sum(_size(shape) for shape in self.input_shapes) + self.m * self.n)

    @property
    def flops(self) -> int:
        if self.inner:
            return 2 * self.m * self.inner * (self.k + self.n)
        return 2 * self.m * self.n * self.k

    @staticmethod
    def from_row(row: dict) -> "FusionCase":
        return FusionCase(**row["case"])

    def to_json(self) -> dict:
        return {name: x for name, x in asdict(self).items() if name != "inner" or x}


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def fusion_cases() -> list[FusionCase]:
    """All, those of one product next to each other."""
    cases = [FusionCase("gemm-gelu", m, n, k) for n, k in (*BERT, *LLAMA) for m in (*FEW, *LENGTHS)]
    cases += [FusionCase("residual-norm", m, n, 0) for n in NORMS for m in (1, *LENGTHS)]
    cases += [FusionCase("gemm-norm", m, n, k) for n, k in NORMED for m in LENGTHS]
    return cases + mlp_cases()


def mlp_cases() -> list[FusionCase]:
    return [FusionCase("mlp", m, n, n, inner=inner) for n, inner in MLPS for m in LENGTHS]


def tiny(case: FusionCase) -> FusionCase:
    """At a size for a CPU."""
    return replace(case, m=min(case.m, 16), n=64, k=64 if case.inner else min(case.k, 32), inner=min(case.inner, 32))
