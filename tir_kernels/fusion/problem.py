"""The definition of what a fused segment computes: a source, then steps on each element, then a norm of each row.

    x = a @ w                  (m, n) float32, for a GemmProblem; or x = the input itself, for a RowProblem
                               two such products one after the other are an MlpProblem
    x = step(x)                for each step in order, elementwise in float32
    out_sum = x                where the problem keeps it (pre-norm models go on with the sum)
    out = norm(x)              LayerNorm or RMSNorm along n, where there is one

Everything between reading the inputs and writing the outputs is float32, which is more exact than a model that rounds
to half precision after each operator.

A norm between products may be deferred: no kernel normalises.  The product before it also writes `statistics` of its
rows, float32 (m, n / 64, 2): for every 64 columns of x, the mean and the sum of squared deviations from it.  Products
that read the norm's result take the statistics instead, and the matrix without the norm.  If the matrix is a product's
a, the product multiplies by weights that include the norm's, and corrects each row (`a_norm`).  If it is a residual,
the product normalises while it adds (a "normed" operand).  The norm's vectors, which have an element for each column,
are float32; the product's own bias may be included in them.
"""

from dataclasses import dataclass
from functools import cached_property

from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.errors import InputError, UnsupportedError

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid")
VALUED = ("scale", "clip")
BINARY = ("add", "multiply")
OPERANDS = ("row", "matrix", "normed")
NORMS = ("layer_norm", "rms_norm")
DTYPES = ("float32", "float16", "bfloat16")
ROW_PADDING = 8  # elements of a product's vectors along n that are read together
GATE_COLUMNS = 8  # that alternate between a gated product's gate and its values: those of one tile of an mma
STATISTICS_COLUMNS = 64  # columns of a matrix that one pair of a row's statistics covers


@dataclass(frozen=True)
class Norm:
    """Normalisation along n: `kind` one of `NORMS`, `eps` added to the variance or mean square.

    `weight` and `bias` say whether the result is then multiplied by a vector (n,), and whether a vector (n,) is added.
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
class Step:
    """One elementwise operation on x (m, n).

    Attributes
    ----------
    kind : str
        One of `ACTIVATIONS` (gelu is the exact one), of `VALUED`: "scale" (x * value), "clip" (x held between -value
        and value, NaN as it is), or one of `BINARY` with an operand.
    operand : str, optional
        The operand of a binary step: "row" is a vector (n,), such as a bias; "matrix" is (m, n), such as a residual or
        a gate; "normed" is a matrix (m, n) that is normalised by its statistics before it is added.
    value : float, optional
        The value of a scale or clip; positive for clip.
    norm : Norm, optional
        The norm of a normed operand.  It has no weight and no bias: they are in the operand's columns.
    """

    kind: str
    operand: str | None = None
    value: float | None = None
    norm: Norm | None = None

    def __post_init__(self):
        if self.kind in BINARY:
            if self.operand not in OPERANDS or self.value is not None:
                raise InputError(f"step {self.kind!r} takes an operand, one of {OPERANDS}, got {self.operand!r}")
        elif self.kind in VALUED:
            if self.operand is not None or not isinstance(self.value, float):
                raise InputError(f"step {self.kind!r} takes a float value, got {self.value!r}")
            if self.kind == "clip" and not self.value > 0:
                raise InputError(f"step 'clip' takes a positive value, got {self.value!r}")
        elif self.kind not in ACTIVATIONS or self.operand is not None or self.value is not None:
            raise InputError(f"step {self.kind!r} is not one of {(*ACTIVATIONS, *VALUED, *BINARY)}, bare")
        is_normed = self.kind == "add" and self.operand == "normed"
        if (self.norm is not None) != is_normed or (self.operand == "normed" and not is_normed):
            raise InputError(
                f"step {self.kind!r} with operand={self.operand!r} and norm={self.norm}: add takes a normed"
            )
        if self.norm is not None and (self.norm.weight or self.norm.bias):
            raise InputError(f"norm={self.norm}: weight and bias of a normed operand belong to its columns")


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
        if self.normed_step is not None and not isinstance(self, GemmProblem):
            raise InputError("a normed operand is added by a matrix product only")

    @cached_property
    def normed_step(self) -> Step | None:
        """The step with a normed operand."""
        return next((step for step in self.steps if step.operand == "normed"), None)

    @property
    def operands(self) -> list[tuple[tuple[int, ...], str]]:
        """Shapes and dtypes of the inputs after the source: the steps' operands, then the norm's weight and bias."""
        vector, matrix = ((self.n,), self.dtype), ((self.m, self.n), self.dtype)
        found: list[tuple[tuple[int, ...], str]] = []
        for step in self.steps:
            if step.operand is not None:
                found.append(vector if step.operand == "row" else matrix)
            if step.norm is not None:
                found += [statistics_of(self.m, self.n), columns_of(self.n)]
        return found + ([vector] * (self.norm.weight + self.norm.bias) if self.norm is not None else [])

    @property
    def operand_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of `operands`."""
        return [shape for shape, _ in self.operands]

    @property
    def source_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs that come first."""
        return [(self.m, self.n)]

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return [*((shape, self.dtype) for shape in self.source_shapes), *self.operands]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [((self.m, self.n), self.dtype)] * (1 + self.keeps_sum)


@dataclass(frozen=True)
class GemmProblem(RowProblem):
    """a (m, k) times w, then steps and a norm: w is (n, k) with layout "nk" (torch.nn.Linear's), (k, n) with "kn".

    Arguments in order: a, w, the operands of `a_norm`, the steps' operands, the norm's weight and bias, then out; where
    `keeps_sum`, out_sum; where `statistics`, the statistics of rows.  Where n is no multiple of `ROW_PADDING`, vectors
    (n,) are longer, up to the next one; what they hold there is not used.  A normed operand y is a matrix (m, n), its
    statistics, and float32 columns (2, n): (y - mean) * scale * columns[0] + columns[1] is added.

    Attributes
    ----------
    a_norm : Norm, optional
        The norm of a: the product is norm(a) @ w.  The caller passes w' = weight * w as w.  With the mean and the scale
        of each row of a, x = scale * (a @ w' - mean * columns[0]) + columns[1].  The operands of `a_norm` are the
        statistics of a, float32 (m, k / 64, 2), and for layer_norm `columns`, float32 (2, n): the sums of the columns
        of w', and what the norm's bias adds.  `a_norm` has no weight and no bias: they are in w' and `columns`.
    statistics : bool
        Whether the statistics of x, before it is rounded to out, are an output, float32 (m, n / 64, 2).
    batch, matrices : int
        Products side by side: the m rows are `batch` equal parts, one after the other, and part p is multiplied by
        matrix p % matrices of w, which holds that many, one after the other: it is (matrices * n, k) or
        (matrices * k, n).  Such a product has no norms.
    gate : str, optional
        One of `ACTIVATIONS`, f: x = f(g) * v, where the product has 2 n columns, `GATE_COLUMNS` of g, as many of v, and
        so on, which is the order of w's columns.  Such a product has no norms and one matrix.
    gate_bias : bool
        Whether a vector (2 n,), in the order of w's columns, is added to g and v.  It is the first operand.
    float32 : str
        How tensor cores multiply float32: "ieee" or "tf32" (cuda/float32/fragments.py).  "ieee" for any other dtype.
    """

    k: int = 0
    w_layout: str = "nk"
    a_norm: Norm | None = None
    statistics: bool = False
    batch: int = 1
    matrices: int = 1
    gate: str | None = None
    gate_bias: bool = False
    float32: str = "ieee"

    def __post_init__(self):
        super().__post_init__()
        check_mode(self.float32, self.dtype)
        if self.w_layout not in ("nk", "kn"):
            raise InputError(f"w_layout={self.w_layout!r} must be 'nk' or 'kn'")
        if self.a_norm is not None and (self.a_norm.weight or self.a_norm.bias):
            raise InputError(f"a_norm={self.a_norm}: its weight and bias belong to w and columns")
        if (self.a_norm is not None) + sum(step.operand == "normed" for step in self.steps) > 1:
            raise InputError("more than one operand of the product is normalised by its statistics")
        if self.statistics and self.norm is not None:
            raise InputError(f"statistics of a product that ends in {self.norm.kind}")
        for name, whole in (("batch", self.m), ("matrices", self.batch)):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1 or whole % getattr(self, name):
                raise InputError(f"{name}={getattr(self, name)!r} must be a positive integer that divides {whole}")
        if self.batch > 1 and (self.norm is not None or self.defers_norm):
            raise UnsupportedError(f"a norm beside {self.batch} products of matrices")
        if self.gate is not None and self.gate not in ACTIVATIONS:
            raise InputError(f"gate={self.gate!r} is not one of {ACTIVATIONS}")
        if self.gate is not None and (self.norm is not None or self.defers_norm or self.batch > 1):
            raise UnsupportedError("a norm, or several matrices, beside a gated product")
        if self.gate_bias and self.gate is None:
            raise InputError("gate_bias without a gate: a step adds the bias")
        for name, needed in (("k", self.a_norm), ("n", self.statistics or self.normed_step)):
            if needed and getattr(self, name) % STATISTICS_COLUMNS:
                raise UnsupportedError(
                    f"{name}={getattr(self, name)} must be a multiple of {STATISTICS_COLUMNS} for statistics of rows"
                )

    @cached_property
    def row_norm(self) -> Norm | None:
        """The deferred norm for which the kernel needs the mean and the scale of each row."""
        return self.a_norm if self.normed_step is None else self.normed_step.norm

    @property
    def defers_norm(self) -> bool:
        """Whether it reads or writes statistics of rows."""
        return self.row_norm is not None or self.statistics

    @property
    def takes_norms(self) -> bool:
        """Whether norms around the product may be deferred to it."""
        return self.norm is None and self.batch == 1 and self.gate is None

    @property
    def w_columns(self) -> int:
        """Columns of the product: n, or twice as many of a gated one."""
        return self.n * (1 if self.gate is None else 2)

    @property
    def rows(self) -> int:
        """Rows that are multiplied by the same matrix."""
        return self.m // self.batch

    @property
    def w_shape(self) -> tuple[int, int]:
        """(w_columns, k) with layout "nk", (k, w_columns) with "kn", as often as w has matrices."""
        n, k = self.w_columns, self.k
        return (self.matrices * n, k) if self.w_layout == "nk" else (self.matrices * k, n)

    @property
    def source_shapes(self) -> list[tuple[int, ...]]:
        return [(self.m, self.k), self.w_shape]

    @property
    def operands(self) -> list[tuple[tuple[int, ...], str]]:
        found: list[tuple[tuple[int, ...], str]] = [((self.w_columns,), self.dtype)] * self.gate_bias
        if self.a_norm is not None:
            found.append(statistics_of(self.m, self.k))
            found += [columns_of(self.n)] * (self.a_norm.kind == "layer_norm")
        vector, padded = (self.n,), (-(-self.n // ROW_PADDING) * ROW_PADDING,)
        return found + [(padded if shape == vector else shape, dtype) for shape, dtype in super().operands]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        return super().outputs + [statistics_of(self.m, self.n)] * self.statistics


def columns_of(n: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a deferred norm's two vectors over the columns."""
    return (2, n), "float32"


def statistics_of(m: int, n: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the statistics of a matrix's rows."""
    return (m, n // STATISTICS_COLUMNS, 2), "float32"


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
        if self.first.defers_norm or self.second.defers_norm:
            raise UnsupportedError("a deferred norm beside two products in one kernel")
        if not (self.first.batch == self.second.batch == 1 and self.first.gate is self.second.gate is None):
            raise UnsupportedError("products of several matrices, or gated ones, two in one kernel")
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
