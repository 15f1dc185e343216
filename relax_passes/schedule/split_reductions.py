"""SplitReductions: a reduction of a large tensor to one number becomes two; many CTAs share the first.

    max(x)  →  max(max(reshape(x, (parts, elements / parts)), axis=1))

One CTA reaches a hundredth of a GPU's bandwidth.  Elementwise operators before the reduction are fused into its first
half, as they were into the whole.  Preconditions: "main" has dataflow blocks; before `LegalizeOps`.
"""

import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import operator, static_shape
from relax_passes.ir.open_blocks import closing_blocks

REDUCTIONS = {"max": relax.op.max, "min": relax.op.min, "sum": relax.op.sum}
ELEMENTWISE = {"isinf", "isnan", "isfinite", "astype", "abs", "negative", "logical_not"}
MOST_PARTS = 512
LEAST_ELEMENTS = 4096  # of a part


@tvm.transform.module_pass(opt_level=0, name="SplitReductions")
class SplitReductions:
    """Split every reduction over all axes, in each function of a module, that has enough elements."""

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
        elements = math.prod(shape)
        parts = parts_of(elements)
        if call.attrs.keepdims or sorted(axes) != list(range(len(shape))) or parts == 1:
            return call
        reduce = REDUCTIONS[operator(call)]
        rows = self._reshaped(call.args[0], (parts, elements // parts))
        return reduce(self.builder_.emit(reduce(rows, axis=1)))

    def _reshaped(self, x, shape) -> relax.Expr:
        """`x` in another shape.

        If elementwise operators make `x`, their source is reshaped: a reshape after them would end a kernel.
        """
        value = self.lookup_binding(x) if isinstance(x, relax.Var) else None
        if value is not None and operator(value) in ELEMENTWISE:
            source = self._reshaped(value.args[0], shape)
            return self.builder_.emit(relax.Call(value.op, [source, *value.args[1:]], value.attrs))
        return self.builder_.emit(relax.op.reshape(x, shape))


def parts_of(elements: int) -> int:
    """Number of parts of a split reduction: a power of 2; 1 if parts would be too short."""
    parts = MOST_PARTS
    while parts > 1 and (elements % parts or elements // parts < LEAST_ELEMENTS):
        parts //= 2
    return parts
