"""The places that a thread of a reduction reads: indices in symbols, whose registers change from step to step."""

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.group.indices import unflatten
from tir_kernels.fusion.group.store import decode
from tir_kernels.fusion.group.symbols import Symbols
from tir_kernels.fusion.reduce.reduction import Reduction
from tir_kernels.fusion.steps import VECTOR


class Places:
    """Indices along some axes of a reduction: an element's, or those of a vector along the last of these axes.

    Attributes
    ----------
    indices : dict of int to an expression
        The index along each axis.
    """

    def __init__(self, symbols: Symbols, reduction: Reduction, axes: tuple[int, ...], are_vectors: bool):
        self.symbols, self.are_vectors = symbols, are_vectors
        extents = reduction.extents(axes)
        elements = math.prod(extents)
        self.is_ragged = are_vectors and not reduction.whole_vectors
        self.rows: list[tuple[tirx.Var, int]] = []
        if self.is_ragged:
            self.vector, self.vectors = symbols.new("vector", -(-elements // VECTOR)), -(-elements // VECTOR)
            position = self.vector * VECTOR + symbols.lane
            if elements % VECTOR:
                position = tirx.Min(position, tirx.IntImm("int32", elements - 1))
            self.indices = dict(zip(axes, unflatten(position, extents)))
            return
        whole = len(axes) - are_vectors
        self.rows = [(symbols.new(f"i{axis}", n), n) for axis, n in zip(axes[:whole], extents)]
        found: list = [var for var, _ in self.rows]
        if are_vectors:
            self.vectors = extents[-1] // VECTOR
            self.vector = symbols.new("column", self.vectors)
            found.append(self.vector * VECTOR + symbols.lane)
        self.indices = dict(zip(axes, found))

    @property
    def variables(self) -> list[tirx.Var]:
        """What the indices depend on, besides the lane."""
        return [var for var, _ in self.rows] + ([self.vector] if self.are_vectors else [])

    def move(self, number) -> None:
        """Give the variables the registers of element or vector `number`."""
        registers = self.symbols.registers
        if self.is_ragged:
            registers[self.vector] = number
            return
        if self.are_vectors:
            has_rows = any(n > 1 for _, n in self.rows)
            registers[self.vector] = scalar("column", T.truncmod(number, self.vectors) if has_rows else number)
            number = scalar("row", T.truncdiv(number, self.vectors)) if has_rows and self.vectors > 1 else number
        decode(self.symbols, self.rows, number)
