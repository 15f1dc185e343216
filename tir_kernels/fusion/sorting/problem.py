"""The definitions of sorting: rows sorted run by run, and runs merged to longer ones, until a row is one run.

    values, order = the first `keep` elements of each run in order, and their positions in the row

The order is PyTorch's: NaN is larger than any number, -0 and 0 are equal, and of equal elements the first comes first,
ascending or descending.  A row of up to `MAX_RUN` elements is sorted as one run.  A longer one is sorted in runs, which
are merged `MAX_FAN` at a time.
"""

from dataclasses import dataclass

from tir_kernels.errors import InputError, UnsupportedError

MAX_RUN = 1024  # elements that one CTA sorts
MAX_FAN = 32  # runs that are merged at a time
KEYS = {
    **dict.fromkeys(("bool", "int8", "uint8", "int16", "uint16", "int32", "float16", "bfloat16", "float32"), "int32"),
    **dict.fromkeys(("uint32", "int64", "float64"), "int64"),
}  # from a dtype to that of the integers whose order is that of its elements
ORDER_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class _Ordering:
    """What sorting and merging have in common.

    Attributes
    ----------
    rows, n : int
        The shape of the input.
    run : int
        Elements of a run of the input; the last run of a row may have fewer.
    keep : int
        Elements that are kept of each run of the output.
    dtype : str
        The dtype of the elements, one of `KEYS`.
    descending : bool
        Whether the largest comes first.
    order_dtype : str
        The dtype of the positions that are written.
    ranks : bool
        Whether the place of each element among the sorted ones is an output, too: the inverse of `order`.
    """

    rows: int
    n: int
    run: int
    keep: int
    dtype: str
    descending: bool = False
    order_dtype: str = "int64"
    ranks: bool = False

    def __post_init__(self):
        for name in ("rows", "n", "run", "keep"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)!r} must be a positive integer")
        if self.dtype not in KEYS:
            raise UnsupportedError(f"dtype={self.dtype!r} is not one of {', '.join(KEYS)}")
        if self.order_dtype not in ORDER_DTYPES:
            raise InputError(f"order_dtype={self.order_dtype!r} is not one of {', '.join(ORDER_DTYPES)}")
        if self.keep > self.out_run:
            raise InputError(f"keep={self.keep} is more than the {self.out_run} elements of a run")
        if self.ranks and (self.out_runs > 1 or self.kept < self.n):
            raise InputError(f"ranks=True of {self.kept} of {self.n} elements in {self.out_runs} runs: rows of one run")

    @property
    def runs(self) -> int:
        """Runs of an input's row."""
        return -(-self.n // self.run)

    @property
    def out_run(self) -> int:
        """Elements of the input that a run of the output is made of; the last run may have fewer."""
        raise NotImplementedError

    @property
    def out_runs(self) -> int:
        """Runs of an output's row."""
        return -(-self.n // self.out_run)

    @property
    def kept(self) -> int:
        """Elements of an output's row: `keep` of each run, of the last one as many as there are."""
        last = self.n - (self.out_runs - 1) * self.out_run
        return (self.out_runs - 1) * self.keep + min(self.keep, last)

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order: values, order, and the ranks where they are wanted."""
        kept: tuple[int, ...] = (self.rows, self.kept)
        found = [(kept, self.dtype), (kept, self.order_dtype)]
        return found + [((self.rows, self.n), self.order_dtype)] * self.ranks


@dataclass(frozen=True)
class SortProblem(_Ordering):
    """Runs of x (rows, n) sorted.  Arguments in order: x, then values, order (rows, kept), and ranks (rows, n)."""

    def __post_init__(self):
        if isinstance(self.run, int) and self.run > MAX_RUN:
            raise InputError(f"run={self.run} must be at most {MAX_RUN}")
        super().__post_init__()

    @property
    def out_run(self) -> int:
        return min(self.run, self.n)

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return [((self.rows, self.n), self.dtype)]


@dataclass(frozen=True)
class MergeProblem(_Ordering):
    """Sorted runs merged, up to `MAX_FAN` neighbours to one.

    Arguments in order: values and their order (rows, n), int32, then values, order (rows, kept), and ranks (rows, n).
    """

    @property
    def out_run(self) -> int:
        return min(self.run * MAX_FAN, self.n)

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return [((self.rows, self.n), self.dtype), ((self.rows, self.n), "int32")]
