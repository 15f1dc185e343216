"""Lower segments: each becomes a call of the first kernel template that computes it, or calls of TVM's kernels.

Preconditions: after `PartitionSegments`, before `LegalizeOps`.  A segment without a template stays a private
function, without `Primitive`.  `LegalizeOps`, `FuseOps` and `FuseTIR` then work inside it, so that TVM's own rules fuse
within its borders only, and `InlinePrivateFunctions` puts the result back into "main".  With `Primitive` it would
become a single PrimFunc, and TVM's schedules have no rule for one that holds more than a product and maps.

Norms that the products around them can take over get no kernel (`deferred_norms`).

The rows of the module attribute `stof.segments` get "kernel", "config", "predicted_us", "measured_us" and "reason".
"""

import math
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax

from relax_passes.attention.repeated_heads import reshaped
from relax_passes.fusion.matching.deferred_norms import DeferredNorms, Plan, Statistics
from relax_passes.fusion.partition_segments import SEGMENT
from relax_passes.fusion.segment_calls import SegmentCall
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of, constant_of
from relax_passes.ir.rebuild import rebuild, substitute
from relax_passes.report_rows import SEGMENTS, segment_rows, with_rows
from tir_kernels.compiling.quick_script import quick_script

DEFAULT = "default"
DEFERRED = "deferred"


@tvm.transform.module_pass(opt_level=0, name="LowerSegments")
class LowerSegments:
    """Lower every segment of "main".

    `chooser` knows the target and its kernel templates.
    """

    def __init__(self, chooser: TemplateChooser):
        self.chooser = chooser

    def transform_module(self, mod, _ctx):
        return _Lowering(mod, self.chooser).transform()


def _own_reason(row) -> str:
    """The reason of a row that no template and no schedule computes: it was a kernel before."""
    return "attention: see its site" if "attention" in row.operators[0] else "a kernel for this operator alone"


class _Lowering:
    def __init__(self, mod, chooser):
        self.mod = mod
        self.chooser = chooser
        self.main = Bindings(mod["main"])
        self.rows = [replace(row, kernel=row.operators[0], reason=_own_reason(row)) for row in segment_rows(mod)]
        self.kernels = {}  # (template, problem, config) -> GlobalVar
        self.zeros = {}  # (shape, dtype) -> the workspace that all kernels share
        self.statistics = {}  # variable of a call -> the row statistics that its kernel writes

    def transform(self):
        uncovered, calls = {}, []
        for var, value in self.main.values.items():
            function = self._function_of(value)
            if function is not None:
                choice = self.chooser.choose(function)
                if isinstance(choice, str):
                    uncovered[value.op] = function.without_attr("Primitive")
                    self._note(function, kernel=DEFAULT, reason=choice)
                else:
                    calls.append(SegmentCall(var, function, tuple(value.args), choice))
        self.norms = DeferredNorms(self.main, calls, self.chooser)
        by_var = {call.var: call for call in calls}

        def lowered(builder, var, new):
            if var not in by_var:
                return None
            call = by_var[var]
            views = _Views(builder, call.function, [new(argument) for argument in call.arguments])
            if var in self.norms.deferred:
                self._note(call.function, kernel=DEFERRED, reason=self.norms.deferred[var])
                self._pass_on(call, views)
            else:
                self._note(call.function, **_described(self.norms.plans[var]))
                self._emit_kernel(call, self.norms.plans[var], views)
            return views.emit(call.function.body.body)

        mod = rebuild(self.mod, lowered)
        mod.update(tvm.IRModule(uncovered))
        return with_rows(mod, SEGMENTS, self.rows)

    def _function_of(self, value) -> relax.Function | None:
        """The segment's function if `value` is a call of a segment, else None."""
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
            return None
        function = self.mod[value.op]
        return function if SEGMENT in function.attrs else None

    def _note(self, function, **what) -> None:
        number = int(function.attrs[SEGMENT])
        self.rows[number] = replace(self.rows[number], **what)

    def _pass_on(self, call: SegmentCall, views) -> None:
        """Replace a deferred norm's result by the matrix that it would have normalised."""
        match = call.choice.match
        (out,) = match.outputs
        views.define(out, views.emit_as(match.inputs[0], static_shape(out), dtype_of(out)))

    def _emit_kernel(self, call: SegmentCall, plan: Plan, views) -> None:
        """Emit one kernel for the segment and define its results; the segment's views stay around the kernel."""
        problem, builder = plan.problem, views.builder
        match = call.choice.match
        sources = plan.inputs if match.gate is None or match.is_arranged else self._arranged(call, plan)
        inputs = [self._input(views, *pair) for pair in zip(sources, problem.inputs, strict=True)]
        operands = plan.choice.template.operands(problem, plan.config, self.chooser.target)
        inputs += [relax.const(array, str(array.dtype)) for array in operands.constants]
        inputs += [self._workspace(*spec) for spec in operands.workspace]
        types = [relax.TensorType(shape, dtype) for shape, dtype in problem.outputs]
        results = builder.emit(relax.call_tir(self._kernel(builder, plan), inputs, types))
        if isinstance(call.choice.match.outputs[0].ty, relax.TupleType):  # of an operator that gives a tuple
            views.define(call.choice.match.outputs[0], results)
            return
        items = (
            [results] if len(types) == 1 else [builder.emit(relax.TupleGetItem(results, i)) for i in range(len(types))]
        )
        if len(items) > len(call.choice.match.outputs):
            self.statistics[call.var] = items[-1]
        for var, result in zip(call.choice.match.outputs, items, strict=False):
            views.define(var, reshaped(builder.emit, result, static_shape(var)))

    def _arranged(self, call: SegmentCall, plan: Plan) -> list:
        """The inputs of a gated product, whose weights and bias are constants in an order of their own."""
        match, inside = call.choice.match, Bindings(call.function)
        sources, problem = list(plan.inputs), plan.problem
        constant = lambda i, shape: array_of(inside.value(sources[i])).reshape(shape)
        sources[1] = match.arranged(constant(1, problem.w_shape), -2 if problem.w_layout == "nk" else -1)
        if problem.gate_bias:
            sources[2] = match.arranged(constant(2, (problem.w_columns,)), 0)
        return sources

    def _input(self, views, source, wanted):
        shape, dtype = wanted
        if isinstance(source, relax.Expr) and len(shape) == 1 and math.prod(shape_of(source)) < shape[0]:
            vector = views.constant(source).ravel()  # of a product whose rows are no multiple of what is read together
            source = np.pad(vector, (0, shape[0] - vector.size))
        if isinstance(source, Statistics):
            return self.statistics[source.call]
        if isinstance(source, np.ndarray):
            return constant_of(source, dtype)
        return views.emit_as(source, shape, dtype)

    def _kernel(self, builder, plan: Plan):
        template = plan.choice.template
        key = template.NAME, plan.problem, plan.config
        if key not in self.kernels:
            with quick_script():
                kernel = template.instantiate(plan.problem, plan.config, self.chooser.target)
            name = "fused_" + template.NAME.replace("-", "_")
            self.kernels[key] = builder.add_func(kernel.without_attr("global_symbol"), name)
        return self.kernels[key]

    def _workspace(self, shape, dtype):
        if (shape, dtype) not in self.zeros:
            self.zeros[shape, dtype] = relax.const(np.zeros(shape, dtype), dtype)
        return self.zeros[shape, dtype]


class _Views:
    """Emits the views and casts around a segment's kernel, with a call's arguments in place of the parameters."""

    def __init__(self, builder, function, arguments):
        self.builder = builder
        self.values = Bindings(function).values
        self.mapping = dict(zip(function.params, arguments))

    def constant(self, expr) -> np.ndarray:
        """The array of a constant of the segment."""
        while isinstance(expr, relax.Var):
            expr = self.values[expr]
        return expr.value.numpy()

    def define(self, var, value):
        self.mapping[var] = value

    def emit(self, expr) -> relax.Expr:
        """`expr` of the segment, in the caller's variables."""
        for var in relax.analysis.free_vars(expr):
            if var not in self.mapping:
                self.mapping[var] = self.builder.emit(self.emit(self.values[var]))
        return substitute(expr, self.mapping)

    def emit_as(self, expr, shape, dtype) -> relax.Expr:
        """The same, in this shape and dtype."""
        expr = self.emit(expr)
        if isinstance(expr, relax.Call):  # a view that the match made for the kernel
            expr = self.builder.emit(expr)
        if dtype_of(expr) != dtype:
            expr = self.builder.emit(relax.op.astype(expr, dtype))
        return reshaped(self.builder.emit, expr, shape)


def _described(plan: Plan) -> dict:
    choice = plan.choice
    return {
        "kernel": choice.template.NAME,
        "config": plan.config.label,
        "predicted_us": choice.predicted_us,
        "measured_us": choice.measured_us,
        "reason": f"{choice.reason}; {plan.note}" if plan.note else choice.reason,
    }
