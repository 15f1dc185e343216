"""The one reduction of a group: its axes, in the order in which threads walk them, and what may stand around it.

Before it stands whatever a group may hold but a norm.  After it stand elementwise operators, casts and reshapes of as
many elements, so that a thread which holds an element of the reduction computes that element of every result.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from tir_kernels.errors import UnsupportedError
from tir_kernels.fusion.group.domains import reads_of
from tir_kernels.fusion.group.operators import ELEMENTWISE
from tir_kernels.fusion.group.problem import NORMS, REDUCTIONS, GroupProblem
from tir_kernels.fusion.group.symbols import Symbols
from tir_kernels.fusion.steps import VECTOR


@dataclass(frozen=True)
class Reduction:
    """A reduction of a value to another one.

    Attributes
    ----------
    number, argument : int
        The numbers of the reduction and of what it reduces.
    kind : str
        One of `REDUCTIONS`.
    shape : tuple of int
        The shape of the argument.
    axes : tuple of int
        The axes that are reduced.
    vector_axis : int
        The axis along which a thread's vectors lie: that along which most of the memory is read.
    """

    number: int
    argument: int
    kind: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    vector_axis: int

    @property
    def along(self) -> bool:
        """Whether vectors lie along what is reduced; else their elements belong to neighbouring outputs."""
        return self.vector_axis in self.axes

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The axes that stay, the vectors' last."""
        return self._ordered([axis for axis in range(len(self.shape)) if axis not in self.axes])

    @cached_property
    def reduced(self) -> tuple[int, ...]:
        """The axes that are reduced, the vectors' last."""
        return self._ordered(list(self.axes))

    def _ordered(self, axes: list[int]) -> tuple[int, ...]:
        return tuple(sorted(axes, key=lambda axis: (axis == self.vector_axis, axis)))

    def extents(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The lengths of some axes."""
        return tuple(self.shape[axis] for axis in axes)

    @property
    def outputs(self) -> int:
        """Elements that stay."""
        return math.prod(self.extents(self.kept))

    @property
    def elements(self) -> int:
        """Elements that are reduced to one."""
        return math.prod(self.extents(self.reduced))

    @property
    def items(self) -> int:
        """What a thread computes at a time: an output, or a vector of neighbouring ones."""
        return self.outputs if self.along else -(-self.outputs // VECTOR)

    @property
    def steps(self) -> int:
        """Vectors that are reduced to one item."""
        return -(-self.elements // VECTOR) if self.along else self.elements

    @property
    def whole_vectors(self) -> bool:
        """Whether no vector goes on along another axis than its own."""
        return bool(self.shape) and self.shape[self.vector_axis] % VECTOR == 0


def has_reduction(problem: GroupProblem) -> bool:
    """Whether a group holds one."""
    return any(value.operator in REDUCTIONS for value in problem.values)


def reduction_of(problem: GroupProblem) -> Reduction:
    """The reduction of a group.  Raises UnsupportedError with the reason if it is not one such as described above."""
    first = len(problem.sources)
    numbers = [first + i for i, value in enumerate(problem.values) if value.operator in REDUCTIONS]
    if len(numbers) != 1:
        raise UnsupportedError(f"{len(numbers)} reductions, where the kernel has one")
    if norm := next((value.operator for value in problem.values if value.operator in NORMS), None):
        raise UnsupportedError(f"{norm} beside a reduction")
    (number,) = numbers
    for result in problem.results:
        _check_result(problem, number, result)
    value = problem.computed(number)
    (argument,) = value.arguments
    if value.dtype == "bool":
        raise UnsupportedError(f"{value.operator} of bool")
    if value.operator == "mean" and "float" not in value.dtype:
        raise UnsupportedError(f"mean of {value.dtype}")
    if problem.value(argument).dtype != value.dtype:
        raise UnsupportedError(f"{value.operator} of {problem.value(argument).dtype} to {value.dtype}")
    shape, axes = problem.value(argument).shape, tuple(map(int, value.numbers))
    return Reduction(number, argument, value.operator, shape, axes, _vector_axis(problem, argument))


def _check_result(problem: GroupProblem, number: int, result: int) -> None:
    """Raise UnsupportedError unless each element of a result needs the same element of the reduction only."""
    after = _after(problem, number)
    if result not in after:
        raise UnsupportedError("a result that is not computed from the reduction")
    size = math.prod(problem.value(number).shape)
    for reader in sorted(after - {number}):
        value = problem.computed(reader)
        if value.operator not in (*ELEMENTWISE, "cast", "reshape") or math.prod(value.shape) != size:
            raise UnsupportedError(f"{value.operator} {value.shape} after a reduction to {size} elements")


def _after(problem: GroupProblem, number: int) -> set[int]:
    """The reduction and the values that are computed from it."""
    found = {number}
    for reader in range(number + 1, len(problem.sources) + len(problem.values)):
        if found & set(problem.computed(reader).arguments):
            found.add(reader)
    return found


def _vector_axis(problem: GroupProblem, argument: int) -> int:
    """The axis along which the largest source lies in memory, or the last one that is longer than 1."""
    shape, symbols = problem.value(argument).shape, Symbols()
    variables = [symbols.new(f"i{axis}", n) for axis, n in enumerate(shape)]
    reads = [(problem.value(number), at) for number, _, at in reads_of(problem, [(argument, list(variables))], symbols)]
    long = [axis for axis, n in enumerate(shape) if n > 1]
    for _, position in sorted(reads, key=lambda read: -math.prod(read[0].shape)):
        for axis in reversed(long):
            step = symbols.step(position, variables[axis])
            if isinstance(step, tirx.IntImm) and int(step) == 1:
                return axis
    return long[-1] if long else len(shape) - 1
