"""The definition of a grouped product: sorted rows, each group of which has a weight of its own.

    out[i] = a[i] @ w[g]        for the rows i of group g: offsets[g - 1] <= i < offsets[g], from row 0 for group 0
    out[i] = 0                  for rows from offsets[groups - 1] on, which belong to no group

Offsets are cumulative ends: they do not decrease.  A group may be empty, and one may have all rows.  PyTorch leaves the
rows of no group undefined.  Sums are float32.
"""

from dataclasses import dataclass

from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.problem import DTYPES

INT32_ELEMENTS = 2**31
OFFSET_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class GroupedProblem:
    """a (m, k) times the weights of `groups` groups, w: (groups, n, k) with layout "nk", (groups, k, n) with "kn".

    Arguments in order: a, w, offsets (groups,), then out (m, n).

    Raises InputError for lengths that are no positive integers and for unknown layouts or dtypes of offsets, and
    UnsupportedError for other dtypes than `DTYPES`.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str
    w_layout: str = "nk"
    offsets_dtype: str = "int32"

    def __post_init__(self):
        for name in ("m", "n", "k", "groups"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)!r} must be a positive integer")
        if self.dtype not in DTYPES:
            raise UnsupportedError(f"dtype={self.dtype!r} is not one of {', '.join(DTYPES)}")
        if self.w_layout not in ("nk", "kn"):
            raise InputError(f"w_layout={self.w_layout!r} must be 'nk' or 'kn'")
        if self.offsets_dtype not in OFFSET_DTYPES:
            raise InputError(f"offsets_dtype={self.offsets_dtype!r} is not one of {', '.join(OFFSET_DTYPES)}")

    @property
    def w_shape(self) -> tuple[int, int, int]:
        """(groups, n, k) with layout "nk", (groups, k, n) with "kn"."""
        return (self.groups, self.n, self.k) if self.w_layout == "nk" else (self.groups, self.k, self.n)

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every input, in order."""
        return [
            ((self.m, self.k), self.dtype),
            (self.w_shape, self.dtype),
            ((self.groups,), self.offsets_dtype),
        ]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [((self.m, self.n), self.dtype)]

    @property
    def is_large(self) -> bool:
        """Whether a matrix, or all weights together, have elements that 32-bit indices do not reach."""
        return max(self.m * self.k, self.m * self.n, self.groups * self.n * self.k) >= INT32_ELEMENTS

    def row_tiles(self, rows: int) -> int:
        """The most tiles of up to `rows` rows of one group that all rows divide into; those of no group count as one.

        Only tiles at the end of a group are smaller, and a group without rows has none.
        """
        ends = min(self.groups + 1, self.m)
        return (self.m + ends * (rows - 1)) // rows
