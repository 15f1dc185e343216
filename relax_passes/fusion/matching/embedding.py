"""Segments that gather rows of tables, add them up and may normalise the sum: words, positions and types, as in BERT.

    take(words, ids) + take(positions, range) + take(types, 0)  →  layer_norm

Tensors that are known at compile time are summed into one table here, whose rows repeat for each sequence of the batch.
Positions usually are such tensors after closed expressions are folded.
"""

import math

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.matching.chain import NORMS, Chain
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.ir.bindings import dtype_of, operator, shape_of, static_shape
from tir_kernels.errors import StofError
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table

INDEX_DTYPES = ("int32", "int64")


def gather_of_rows(m: int, n: int, dtype: str, table_rows: int, index_dtype: str) -> EmbeddingProblem:
    """The problem of a gather alone: `m` rows of (table_rows, n) at places of `index_dtype`."""
    return EmbeddingProblem(m, n, dtype, (Table(table_rows),), index_dtype)


class Embedding(Chain):
    """Finds the tables whose rows are summed; what follows the sum is a chain's end."""

    def match(self) -> SegmentMatch:
        """The segment's problem and what its inputs and outputs are; NoProblem says why there is none."""
        operators = list(zip(self.graph.operators, self.graph.variables))
        end = next((i for i, (operator_, _) in enumerate(operators) if operator_.name in NORMS), len(operators))
        while end > 1 and operators[end - 1][0].name == "astype":
            end -= 1
        self.current = operators[end - 1][1]
        shape = shape_of(self.current)
        self.m, self.n = math.prod(shape[:-1]), shape[-1]
        self.shape = shape
        self.tables, self.constants, self.used = [], [], set()
        self._sum(self.current)
        if not self.tables:
            raise NoProblem("it gathers no rows of a table")
        beside = [operator_.name for i, (operator_, var) in enumerate(operators[:end]) if var not in self.used]
        if beside:
            raise NoProblem(f"{' and '.join(beside)} is no part of the sum of rows")
        index_dtype = dtype_of(self.inputs[0])
        dtype = dtype_of(self.inputs[1])
        if self.constants:
            self._add_constants(index_dtype, dtype)
        for operator_, var in operators[end:]:
            self._follow(operator_, var)
        outputs = self._outputs()
        if {dtype_of(x) for x in (*self.inputs[1::2], *outputs)} != {dtype}:
            raise NoProblem(f"tables and results are not all {dtype}")
        self._check_casts(dtype)
        try:
            problem = EmbeddingProblem(
                self.m, self.n, dtype, tuple(self.tables), index_dtype, self.norm, len(outputs) == 2
            )
        except StofError as error:
            raise NoProblem(str(error)) from None
        return SegmentMatch(problem, (*self.inputs, *self.norm_inputs), outputs)

    def _sum(self, expr, shape=None):
        """Collect the summands of `expr`, whose rows are those of a tensor of `shape`."""
        shape = shape or static_shape(expr)
        if isinstance(expr, relax.Var) and expr in self.graph.index:
            self.used.add(expr)
        value = self.bindings.value(expr)
        inner = self.bindings.same_elements(expr)
        if isinstance(value, GenericConst):
            period = self._period(shape)
            self.constants.append((value.value.numpy().reshape(-1, self.n), period))
        elif inner is not None:
            self._sum(inner, shape)
        elif operator(value) == "astype":
            self.casts.add(dtype_of(expr))
            self._sum(value.args[0], shape)
        elif operator(value) == "add":
            for argument in value.args:
                self._sum(argument)
        elif operator(value) == "take":
            self._gather(value, shape)
        else:
            raise NoProblem(f"a summand of shape {shape} is neither rows of a table nor known at compile time")

    def _gather(self, take, shape):
        table, index = take.args
        is_rows = shape_of(table)[1:] == (self.n,) and take.attrs.axis is not None and int(take.attrs.axis) == 0
        if not is_rows:
            raise NoProblem(f"take along dimension {take.attrs.axis} of {static_shape(table)}")
        if str(take.attrs.mode) not in ("nan", "fast"):
            raise NoProblem(f"take in mode {take.attrs.mode!s} outside the table")
        self.tables.append(Table(shape_of(table)[0], self._period(shape)))
        self.inputs += [self._index(index), self._outside(table)]

    def _index(self, expr):
        """`expr` before reshapes and casts between integers."""
        while True:
            if isinstance(expr, relax.Var) and expr in self.graph.index:
                self.used.add(expr)
            inner = self.bindings.same_elements(expr)
            cast = self.bindings.call(expr, "astype")
            if inner is not None:
                expr = inner
            elif cast is not None and {dtype_of(expr), dtype_of(cast.args[0])} <= set(INDEX_DTYPES):
                expr = cast.args[0]
            else:
                break
        if dtype_of(expr) not in INDEX_DTYPES:
            raise NoProblem(f"indices of {dtype_of(expr)}")
        return self._outside(expr)

    def _period(self, shape) -> int | None:
        """The number of rows after which a summand of `shape` repeats; None if it has all m rows."""
        rows = list(shape[:-1])
        while rows and rows[0] == 1:
            rows.pop(0)
        expected = list(self.shape[:-1])
        if shape[-1:] != (self.n,) or (rows and expected[len(expected) - len(rows) :] != rows):
            raise NoProblem(f"a summand of shape {shape} is broadcast to {self.shape}")
        period = math.prod(rows)
        return None if period == self.m else period

    def _add_constants(self, index_dtype, dtype):
        rows = max(period or self.m for _, period in self.constants)
        total = np.zeros((rows, self.n), np.float32)
        for array, period in self.constants:
            total += np.tile(array.astype(np.float32), (rows // (period or self.m), 1))
        self.tables.append(Table(rows, None if rows == self.m else rows))
        self.inputs += [relax.const(np.arange(rows), index_dtype), relax.const(total, dtype)]
