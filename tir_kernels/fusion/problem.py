"""What a fused segment computes, whatever runs it: a source, then steps on each element, then a norm of each row.

    x = a @ w                  (m, n) float32, for a GemmProblem; or x = the input itself, for a RowProblem
                               two such products one after the other are an MlpProblem
    x = step(x)                for each step in order, elementwise in float32
    out_sum = x                where the problem keeps it (pre-norm models go on with the sum)
    out = norm(x)              LayerNorm or RMSNorm along n, where there is one

Everything between reading the inputs and writing the outputs is float32; a model that rounds to half precision after
each operator is less exact, not more.
"""

from dataclasses import dataclass

from tir_kernels.errors import InputError, UnsupportedError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid")
BINARY = ("add", "multiply")
OPERANDS = ("row", "matrix")
NORMS = ("layer_norm", "rms_norm")
DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Step:
    """One elementwise operation on x (m, n).

    Attributes
    ----------
    kind : str
        One of `ACTIVATIONS` (gelu is the exact one), "scale" (x * value), or one of `BINARY` with an operand.
    operand : str, optional
        Of a binary step: "row" is a vector (n,), as a bias is, "matrix" is (m, n), as a residual or a gate is.
    value : float, optional
        Of a scale.
    """

    kind: str
    operand: str | None = None
    value: float | None = None

    def __post_init__(self):
        if self.kind in BINARY:
            if self.operand not in OPERANDS or self.value is not None:
                raise InputError(f"step {self.kind!r} takes an operand, one of {OPERANDS}, got {self.operand!r}")
        elif self.kind == "scale":
            if self.operand is not None or not isinstance(self.value, float):
                raise InputError(f"step 'scale' takes a float value, got {self.value!r}")
        elif self.kind not in ACTIVATIONS or self.operand is not None or self.value is not None:
            raise InputError(f"step {self.kind!r} is not one of {(*ACTIVATIONS, 'scale', *BINARY)}, bare")


@dataclass(frozen=True)
class Norm:
    """Normalisation along n: `kind` one of `NORMS`, `eps` added to the variance or mean square.

    `weight` and `bias` say whether x is then multiplied by a vector (n,) and has one added.
    """

    kind: str
    eps: float
    weight: bool = True
    bias: bool = True

    def __post_init__(self):
        if self.kind not in NORMS:
            raise InputError(f"norm {self.kind!r} is not one of {NORMS}")
        if self.eps < 0:
            raise InputError(f"norm eps={self.eps} must not be negative")


@dataclass(frozen=True)
class RowProblem:
    """An elementwise chain and a norm on a matrix (m, n).

    Arguments in order: x (m, n), operands of the steps, weight and bias of the norm, then out and, where `keeps_sum`,
    out_sum.
    """

    m: int
    n: int
    dtype: str
    steps: tuple[Step, ...] = ()
    norm: Norm | None = None
    keeps_sum: bool = False

    def __post_init__(self):
        for name in _sizes(self):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)!r} must be a positive integer")
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.keeps_sum and self.norm is None:
            raise InputError("keeps_sum without a norm: the output is the sum")

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs after the source: the steps' operands, then the norm's weight and bias."""
        shapes = [(self.n,) if s.operand == "row" else (self.m, self.n) for s in self.steps if s.operand is not None]
        if self.norm is not None:
            shapes += [(self.n,)] * (self.norm.weight + self.norm.bias)
        return shapes

    @property
    def source_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs that come first."""
        return [(self.m, self.n)]

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return [(shape, self.dtype) for shape in (*self.source_shapes, *self.operand_shapes)]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [((self.m, self.n), self.dtype)] * (1 + self.keeps_sum)


@dataclass(frozen=True)
class GemmProblem(RowProblem):
    """a (m, k) times w, then steps and a norm: w is (n, k) with layout "nk" (torch.nn.Linear's), (k, n) with "kn".

    Arguments in order: a, w, the steps' operands, the norm's weight and bias, then out and, where `keeps_sum`, out_sum.
    """

    k: int = 0
    w_layout: str = "nk"

    def __post_init__(self):
        super().__post_init__()
        if self.w_layout not in ("nk", "kn"):
            raise InputError(f"w_layout={self.w_layout!r} must be 'nk' or 'kn'")

    @property
    def w_shape(self) -> tuple[int, int]:
        """(n, k) with layout "nk", (k, n) with "kn"."""
        return (self.n, self.k) if self.w_layout == "nk" else (self.k, self.n)

    @property
    def source_shapes(self) -> list[tuple[int, ...]]:
        return [(self.m, self.k), self.w_shape]


@dataclass(frozen=True)
class MlpProblem:
    """Two products one after the other: the `out` of `first`, (m, inner) in the problems' dtype, is the a of `second`.

    Arguments in order: a, w and the steps' operands of `first`, then w, the steps' operands and the norm's weight and
    bias of `second`, then the outputs of `second`.
    """

    first: GemmProblem
    second: GemmProblem

    def __post_init__(self):
        if self.first.norm is not None:
            raise InputError(f"{self.first.norm.kind} between two products: the first has none")
        for name, given, expected in (
            ("m", self.second.m, self.first.m),
            ("k", self.second.k, self.first.n),
            ("dtype", self.second.dtype, self.first.dtype),
        ):
            if given != expected:
                raise InputError(f"{name}={given!r} of the second product must be {expected!r}, as the first gives it")

    @property
    def m(self) -> int:
        """Rows."""
        return self.first.m

    @property
    def n(self) -> int:
        """Columns of the result."""
        return self.second.n

    @property
    def dtype(self) -> str:
        return self.first.dtype

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return self.first.inputs + self.second.inputs[1:]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return self.second.outputs


def _sizes(problem) -> tuple[str, ...]:
    return ("m", "n", "k") if isinstance(problem, GemmProblem) else ("m", "n")
