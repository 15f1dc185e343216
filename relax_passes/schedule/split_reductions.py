"""SplitReductions: a reduction of a large tensor to few numbers becomes two; many CTAs share the first.

    max(x)               →  max(max(reshape(x, (parts, elements / parts)), axis=1))
    sum(x, axis=rows)    →  sum(sum(reshape(x, (…, parts, rows / parts, columns)), axis=rows), axis=parts)

One CTA reaches a hundredth of a GPU's bandwidth, and so do the few that have a column each.  Elementwise operators
before the reduction are fused into its first half, as they were into the whole.  Preconditions: "main" has dataflow
blocks; before `LegalizeOps`.
"""

import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import dtype_of, operator, shape_of, static_shape
from relax_passes.ir.open_blocks import closing_blocks

REDUCTIONS = {"max": relax.op.max, "min": relax.op.min, "sum": relax.op.sum}
UNARY = {"isinf", "isnan", "isfinite", "astype", "abs", "negative", "logical_not", "square", "sqrt", "exp"}
BINARY = {"add", "subtract", "multiply", "divide"}
MOST_PARTS = 512
LEAST_ELEMENTS = 4096  # of a part
COLUMNS = 1 << 17  # that keep a GPU busy, a thread each
LEAST_ROWS = 32  # of a column's part


@tvm.transform.module_pass(opt_level=0, name="SplitReductions")
class SplitReductions:
    """Split the reductions over all axes, and those over the axis before the last, that have enough elements."""

    def transform_module(self, mod, _ctx):
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                splitter = _Splitter(mod)
                with closing_blocks(splitter.builder_):
                    mod.update_func(name, splitter.visit_expr(function))
        return mod


@relax.expr_functor.mutator
class _Splitter(relax.PyExprMutator):
    def visit_call_(self, call):
        call = super().visit_call_(call)
        if operator(call) not in REDUCTIONS or (shape := static_shape(call.args[0])) is None:
            return call
        axes = range(len(shape)) if call.attrs.axis is None else [int(a) % len(shape) for a in call.attrs.axis]
        reduce = REDUCTIONS[operator(call)]
        if sorted(axes) == list(range(len(shape))):
            return self._to_a_number(call, shape, reduce)
        if list(axes) == [len(shape) - 2]:
            return self._of_columns(call, shape, reduce)
        return call

    def _to_a_number(self, call, shape, reduce) -> relax.Expr:
        elements = math.prod(shape)
        parts = parts_of(elements)
        if call.attrs.keepdims or parts == 1:
            return call
        rows = self._reshaped(call.args[0], (parts, elements // parts))
        return reduce(self.builder_.emit(reduce(rows, axis=1)))

    def _of_columns(self, call, shape, reduce) -> relax.Expr:
        *outer, rows, columns = shape
        parts = column_parts_of(rows, math.prod(outer) * columns)
        if parts == 1 or dtype_of(call) in ("float16", "bfloat16"):  # partial sums would be rounded
            return call
        axis = len(outer)
        partial = self.builder_.emit(reduce(self._split(call.args[0], axis, parts), axis=axis + 1))
        return reduce(partial, axis=axis, keepdims=bool(call.attrs.keepdims))

    def _split(self, x, axis: int, parts: int) -> relax.Expr:
        """`x` with the axis before its last one cut in two, before the elementwise operators that make `x`."""
        shape = shape_of(x)
        value = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if len(shape) == axis + 2 and shape[axis] > 1 and value is not None:
            if operator(value) in UNARY | BINARY and all(static_shape(a) is not None for a in value.args):
                arguments = [self._split(a, axis, parts) for a in value.args]
                return self.builder_.emit(relax.Call(value.op, arguments, value.attrs))
        missing = axis + 2 - len(shape)
        if missing > axis:
            return x  # it has columns only, or is a number
        rows = shape[axis - missing]
        cut = (1, 1) if rows == 1 else (parts, rows // parts)
        return self.builder_.emit(relax.op.reshape(x, (*shape[: axis - missing], *cut, shape[-1])))

    def _reshaped(self, x, shape) -> relax.Expr:
        """`x` in another shape.

        If elementwise operators make `x`, their source is reshaped: a reshape after them would end a kernel.
        """
        value = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if value is not None and operator(value) in UNARY:
            source = self._reshaped(value.args[0], shape)
            return self.builder_.emit(relax.Call(value.op, [source, *value.args[1:]], value.attrs))
        return self.builder_.emit(relax.op.reshape(x, shape))


def parts_of(elements: int) -> int:
    """Number of parts of a split reduction: a power of 2; 1 if parts would be too short."""
    parts = MOST_PARTS
    while parts > 1 and (elements % parts or elements // parts < LEAST_ELEMENTS):
        parts //= 2
    return parts


def column_parts_of(rows: int, columns: int) -> int:
    """Number of parts of `rows` rows in each of `columns` columns: 1, or enough for as many threads as a GPU runs."""
    wanted = min(-(-COLUMNS // columns), rows // LEAST_ROWS, MOST_PARTS)
    return next((parts for parts in range(wanted, 1, -1) if rows % parts == 0), 1)
