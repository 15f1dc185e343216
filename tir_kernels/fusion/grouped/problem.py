"""The definition of a grouped product: sorted rows, each group of which has a weight of its own.

    x[i] = a[i] @ w[g]          for the rows i of group g: offsets[g - 1] <= i < offsets[g], from row 0 for group 0;
                                a[rows[i]] in place of a[i] where rows are gathered, NaN if there is no such row
    x[i] = 0                    for rows from offsets[groups - 1] on, which belong to no group
    x = f(gate) * value         of two halves of the columns, where the problem has a gate
    x = step(x)                 for each step in order, elementwise
    out = x

Offsets are cumulative ends: they do not decrease.  A group may be empty, and one may have all rows.  PyTorch leaves the
rows of no group undefined.  Everything between reading the inputs and writing the output is float32.
"""

from dataclasses import dataclass
from typing import ClassVar

from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.problem import ACTIVATIONS, DTYPES, GATE_COLUMNS, GemmProblem, Step

INT32_ELEMENTS = 2**31
INDEX_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class GroupedProblem:
    """a (m, k) times the weights of `groups` groups, w: (groups, n, k) with layout "nk", (groups, k, n) with "kn".

    Arguments in order: a, w, offsets (groups,), rows (m,) where they are gathered, then out (m, n).

    Attributes
    ----------
    gate : str, optional
        One of `ACTIVATIONS`, f: x = f(g) * v, where w has 2 n columns in place of n: `GATE_COLUMNS` of g, as many of v,
        and so on (the `gate` of GemmProblem).
    steps : tuple of Step
        Steps without operands.
    gathered_from : int, optional
        Rows of a, from which `rows` chooses m; None where a has m rows, one for each of out.

    Raises InputError for lengths that are no positive integers, for unknown layouts, dtypes of indices and gates, for a
    gate whose n is no multiple of `GATE_COLUMNS` and for steps with operands, and UnsupportedError for other dtypes
    than `DTYPES`.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str
    w_layout: str = "nk"
    offsets_dtype: str = "int32"
    gate: str | None = None
    steps: tuple[Step, ...] = ()
    gathered_from: int | None = None
    rows_dtype: str = "int32"
    gate_bias: ClassVar[bool] = False  # as a GemmProblem may have it

    def __post_init__(self):
        for name in ("m", "n", "k", "groups", "a_rows"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)!r} must be a positive integer")
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.w_layout not in ("nk", "kn"):
            raise InputError(f"w_layout={self.w_layout!r} must be 'nk' or 'kn'")
        for name in ("offsets_dtype", "rows_dtype"):
            if getattr(self, name) not in INDEX_DTYPES:
                raise InputError(f"{name}={getattr(self, name)!r} is not one of {', '.join(INDEX_DTYPES)}")
        if self.gate is not None and (self.gate not in ACTIVATIONS or self.n % GATE_COLUMNS):
            raise InputError(f"gate={self.gate!r} of n={self.n}: one of {ACTIVATIONS}, of multiples of {GATE_COLUMNS}")
        if any(step.operand is not None for step in self.steps):
            raise InputError(f"steps={self.steps} of a grouped product must have no operands")

    @property
    def a_rows(self) -> int:
        """Rows of a."""
        return self.m if self.gathered_from is None else self.gathered_from

    @property
    def w_columns(self) -> int:
        """Columns of the product: n, or twice as many of a gated one."""
        return self.n * (1 if self.gate is None else 2)

    @property
    def w_shape(self) -> tuple[int, int, int]:
        """(groups, w_columns, k) with layout "nk", (groups, k, w_columns) with "kn"."""
        n, k = self.w_columns, self.k
        return (self.groups, n, k) if self.w_layout == "nk" else (self.groups, k, n)

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        found: list[tuple[tuple[int, ...], str]] = [((self.a_rows, self.k), self.dtype), (self.w_shape, self.dtype)]
        rows = [((self.m,), self.rows_dtype)] * (self.gathered_from is not None)
        return [*found, ((self.groups,), self.offsets_dtype), *rows]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [((self.m, self.n), self.dtype)]

    @property
    def is_large(self) -> bool:
        """Whether a matrix, or all weights together, have elements that 32-bit indices do not reach."""
        return max(self.a_rows * self.k, self.m * self.n, self.groups * self.w_columns * self.k) >= INT32_ELEMENTS

    def product(self, m: int) -> GemmProblem:
        """The product of m rows by one of the weights, with the gate and the steps."""
        return GemmProblem(m, self.n, self.dtype, self.steps, k=self.k, w_layout=self.w_layout, gate=self.gate)

    def row_tiles(self, rows: int) -> int:
        """The most tiles of up to `rows` rows of one group that all rows divide into; those of no group count as one.

        Only tiles at the end of a group are smaller, and a group without rows has none.
        """
        ends = min(self.groups + 1, self.m)
        return (self.m + ends * (rows - 1)) // rows
