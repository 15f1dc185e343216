"""What is known of index expressions: symbols with ranges, and the lane of a vector among them."""

from collections.abc import Mapping, Sequence

import tvm
import tvm_ffi
from tvm import tirx
from tvm.tirx import IntImm, Var

from tir_kernels.fusion.steps import VECTOR


class Symbols:
    """Integer variables from 0 to their extents, of which `lane` counts the elements of a vector.

    `registers` are the values that the variables have in a kernel, once it is emitted.
    """

    def __init__(self):
        self.registers: dict[Var, object] = {}
        self.analyzer = tvm.sym.Analyzer()
        self.lane = self.new("lane", VECTOR)

    def new(self, name: str, extent: int, first: int = 0) -> Var:
        """A variable from `first` to below `extent`."""
        var = Var(name, "int32")
        self.analyzer.bind(var, tvm.ir.Range(first, extent))
        return var

    def simplified(self, indices: Sequence) -> list:
        """Equal expressions in a canonical form."""
        return [self.analyzer.simplify(index) for index in indices]

    def at(self, expression, lane: int):
        """A simplified expression at one lane, still in symbols."""
        return self.analyzer.simplify(substitute(expression, {self.lane: IntImm("int32", lane)}))

    def first_of_neighbours(self, expression):
        """The expression at lane 0 if it grows by one with each lane, else None."""
        first = self.at(expression, 0)
        return first if self.analyzer.simplify(expression - first).same_as(self.lane) else None

    def step(self, expression, var: Var):
        """By how much an expression grows from 0 to 1 of a variable, simplified."""
        ends = [substitute(expression, {var: IntImm("int32", value)}) for value in (1, 0)]
        return self.analyzer.simplify(ends[0] - ends[1])

    def is_multiple(self, expression, number: int) -> bool:
        """Whether an expression is known to be a multiple of a number."""
        return self.remainder(expression, number) == 0

    def remainder(self, expression, number: int) -> int | None:
        """What is left of an expression divided by a number, or None if it is not known to be always the same."""
        known = self.analyzer.modular_set(expression)
        return int(known.base) % number if int(known.coeff) % number == 0 else None

    def is_known(self, condition) -> bool:
        """Whether a condition always holds."""
        return bool(self.analyzer.can_prove(condition))

    def inside(self, index, extent: int):
        """An index, or the nearest one below `extent` if it may lie outside."""
        if self.is_known(index >= 0) and self.is_known(index < extent):
            return index
        return tirx.Min(tirx.Max(index, IntImm("int32", 0)), IntImm("int32", extent - 1))

    def in_registers(self, expression, lane: int = 0):
        """An expression as the kernel computes it, at a lane if it depends on it."""
        return substitute(self.at(expression, lane), self.registers)


def substitute(expression, values: Mapping):
    """An expression with values in place of variables."""
    return tvm_ffi.structural_map(expression, (Var, lambda var: values.get(var, var)))


def depends(expression, var: Var) -> bool:
    """Whether an expression depends on a variable."""
    found: list[Var] = []
    tvm_ffi.structural_walk(expression, (Var, found.append), order="post")
    return any(other.same_as(var) for other in found)
