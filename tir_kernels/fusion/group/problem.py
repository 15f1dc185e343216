"""The definition of an elementwise group: values computed from tensors, element by element, through any views.

Values are numbered: the sources first, then `values` in order, each from earlier ones.  Everything between reading the
sources and writing the results is float32 where it is a float; integers and booleans keep their dtype.

    elementwise      the operators of operators.py; arguments broadcast as NumPy's do
    constant         one number, `numbers[0]`, of shape ()
    cast             to the value's dtype
    reshape          the elements in order
    permute          `numbers` are the axes
    slice            `numbers` are (first, step) of each dimension; the shape says how many
    take             along an axis: `numbers` are (axis, first, step of each dimension that takes the axis's place)
    roll             along the axis `numbers[0]`, from element `numbers[1]` on and around the end
    broadcast        to the shape, as NumPy does
    concat           along the axis `numbers[0]`
    pad              with `numbers[0]`, after `numbers[1 + axis]` elements more at the beginning of each dimension
    gather           of x at the places (its second argument, of the value's shape) along the axis `numbers[0]`
    rows             of x at the places (its second argument, of any shape, in place of the axis `numbers[0]`): whole
                     slices of x; outside of x they are NaN where `numbers[1]` is 1, else those of the nearest place
    layer_norm, rms_norm     along the last dimension: `numbers` are (eps, whether a weight and a bias follow x)
    sum, mean, prod, max, min     along the axes `numbers`, which the shape leaves out or has as 1; NaN stays in extrema
"""

import math
from dataclasses import dataclass
from functools import cached_property

from tir_kernels.errors import InputError
from tir_kernels.fusion.group.operators import ELEMENTWISE

VIEWS = ("reshape", "permute", "slice", "take", "roll", "broadcast", "concat", "pad")
NORMS = ("layer_norm", "rms_norm")
READS = ("gather", "rows")  # at places that are values
REDUCTIONS = ("sum", "mean", "prod", "max", "min")


@dataclass(frozen=True)
class Tensor:
    """A source: a contiguous tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Value:
    """One operator of a group.

    Attributes
    ----------
    operator : str
        "constant", "cast", one of `READS`, of `VIEWS`, of `NORMS`, of `REDUCTIONS`, or of `ELEMENTWISE`.
    arguments : tuple of int
        The numbers of the values that it reads.
    shape, dtype
        What it gives.
    numbers : tuple of int or float
        Its attributes, as the module describes them.
    """

    operator: str
    arguments: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    numbers: tuple[int | float, ...] = ()

    def __post_init__(self):
        if self.operator not in ("constant", "cast", *READS, *VIEWS, *NORMS, *REDUCTIONS, *ELEMENTWISE):
            raise InputError(f"operator {self.operator!r} is none of a group's")


@dataclass(frozen=True)
class GroupProblem:
    """Arguments in order: the sources, then one output for each of `results`, numbers of values."""

    sources: tuple[Tensor, ...]
    values: tuple[Value, ...]
    results: tuple[int, ...]

    def __post_init__(self):
        for number, value in enumerate(self.values, len(self.sources)):
            for argument in value.arguments:
                if not 0 <= argument < number:
                    raise InputError(f"{value.operator} reads value {argument}, which is not before it")
        for result in self.results:
            if not len(self.sources) <= result < len(self.sources) + len(self.values):
                raise InputError(f"result {result} is none of the values")

    def value(self, number: int) -> Tensor | Value:
        """The source or value of this number."""
        count = len(self.sources)
        return self.sources[number] if number < count else self.values[number - count]

    def computed(self, number: int) -> Value:
        """The value of this number, which is no source."""
        return self.values[number - len(self.sources)]

    @property
    def dtype(self) -> str:
        """The dtype of the first result."""
        return self.value(self.results[0]).dtype

    @property
    def inputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every source, in order."""
        return [(source.shape, source.dtype) for source in self.sources]

    @property
    def outputs(self) -> list[tuple[tuple[int, ...], str]]:
        """Shape and dtype of every output, in order."""
        return [(self.value(result).shape, self.value(result).dtype) for result in self.results]

    @cached_property
    def elements_read(self) -> tuple[int, ...]:
        """For each source, how many of its elements are read at least once, by shapes: at most all of them."""
        needed = dict.fromkeys(range(len(self.sources) + len(self.values)), 0)
        for result in self.results:
            needed[result] = math.prod(self.value(result).shape)
        for number in range(len(needed) - 1, -1, -1):
            value = self.value(number)
            needed[number] = min(needed[number], math.prod(value.shape))
            if isinstance(value, Value):
                whole = value.operator in ("concat", "gather", *NORMS, *REDUCTIONS)
                for argument in value.arguments:
                    size = math.prod(self.value(argument).shape)
                    needed[argument] += size if whole else min(size, needed[number])
        return tuple(needed[number] for number in range(len(self.sources)))
