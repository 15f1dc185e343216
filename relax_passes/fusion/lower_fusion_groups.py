"""Lower fusion groups: a segment becomes a call of the first kernel template that computes it, or TVM's own kernels.

Preconditions: after `PartitionFusionGroups`, before `LegalizeOps`.  A group that no template covers stays a private
function, without `Primitive`: `LegalizeOps`, `FuseOps` and `FuseTIR` then work inside it, so that TVM's own rules fuse
what they can and never across its borders, and `InlinePrivateFunctions` puts the result back into "main".  As one
function it would be one PrimFunc, for which TVM's schedules have no rule once it holds more than a product and maps.

The rows of the module attribute `stof.segments` get "kernel", "config", "predicted_us", "measured_us" and "reason".
"""

import json

import numpy as np
import tvm
from tvm import relax

from relax_passes.bindings import Bindings, dtype_of, static_shape
from relax_passes.fusion.partition_fusion_groups import SEGMENT, SEGMENTS
from relax_passes.fusion.rebuild import rebuild, substitute
from relax_passes.fusion.template_choice import TemplateChoice, TemplateChooser
from relax_passes.repeated_heads import reshaped
from tir_kernels.quick_script import quick_script

DEFAULT = "default"
NO_TIMES = {"predicted_us": None, "measured_us": None}


@tvm.transform.module_pass(opt_level=0, name="LowerFusionGroups")
class LowerFusionGroups:
    """Lower every group of "main".

    `chooser` knows the target and its kernel templates.
    """

    def __init__(self, chooser: TemplateChooser):
        self.chooser = chooser

    def transform_module(self, mod, _ctx):
        return _Lowering(mod, self.chooser).transform()


class _Lowering:
    def __init__(self, mod, chooser):
        self.mod = mod
        self.chooser = chooser
        self.values = Bindings(mod["main"]).values
        self.rows = json.loads(str(mod.attrs[SEGMENTS]))
        self.kernels = {}  # (template, problem, config) -> GlobalVar
        self.zeros = {}  # (shape, dtype) -> the workspace that all kernels share

    def transform(self):
        for row in self.rows:
            row.update(kernel=row["operators"][0], config="", reason="attention: see its site", **NO_TIMES)
        uncovered = {}

        def replace(builder, var, new):
            call = self._group_call(var)
            if call is None:
                return None
            function = self.mod[call.op]
            choice = self.chooser.choose(function)
            self.rows[int(function.attrs[SEGMENT])].update(_describe(choice))
            if isinstance(choice, str):
                uncovered[call.op] = function.without_attr("Primitive")
                return None
            return self._emit_kernel(builder, function, [new(argument) for argument in call.args], choice)

        mod = rebuild(self.mod, replace)
        mod.update(tvm.IRModule(uncovered))
        return mod.with_attr(SEGMENTS, json.dumps(self.rows))

    def _group_call(self, var):
        value = self.values.get(var)
        if not isinstance(value, relax.Call) or not isinstance(value.op, tvm.ir.GlobalVar):
            return None
        return value if SEGMENT in self.mod[value.op].attrs else None

    def _emit_kernel(self, builder, function, arguments, choice: TemplateChoice):
        """The group's results, computed by one kernel between the views that the group has around it."""
        match, problem = choice.match, choice.match.problem
        views = _Views(builder, function, arguments)
        inputs = [views.emit_as(expr, *wanted) for expr, wanted in zip(match.inputs, problem.inputs, strict=True)]
        inputs += [self._workspace(*workspace) for workspace in choice.workspace]
        types = [relax.TensorType(shape, dtype) for shape, dtype in problem.outputs]
        results = builder.emit(relax.call_tir(self._kernel(builder, choice), inputs, types))
        for i, var in enumerate(match.outputs):
            result = results if len(types) == 1 else builder.emit(relax.TupleGetItem(results, i))
            views.define(var, reshaped(builder.emit, result, static_shape(var)))
        return views.emit(function.body.body)

    def _kernel(self, builder, choice: TemplateChoice):
        key = choice.template.NAME, choice.match.problem, choice.config
        if key not in self.kernels:
            with quick_script():
                kernel = choice.template.instantiate(choice.match.problem, choice.config, self.chooser.target)
            name = "fused_" + choice.template.NAME.replace("-", "_")
            self.kernels[key] = builder.add_func(kernel.without_attr("global_symbol"), name)
        return self.kernels[key]

    def _workspace(self, shape, dtype):
        if (shape, dtype) not in self.zeros:
            self.zeros[shape, dtype] = relax.const(np.zeros(shape, dtype), dtype)
        return self.zeros[shape, dtype]


class _Views:
    """Emits what a group has around its kernel, with the arguments of a call in place of its parameters."""

    def __init__(self, builder, function, arguments):
        self.builder = builder
        self.values = Bindings(function).values
        self.mapping = dict(zip(function.params, arguments))

    def define(self, var, value):
        self.mapping[var] = value

    def emit(self, expr) -> relax.Expr:
        """`expr` of the group, in the caller's variables."""
        for var in relax.analysis.free_vars(expr):
            if var not in self.mapping:
                self.mapping[var] = self.builder.emit(self.emit(self.values[var]))
        return substitute(expr, self.mapping)

    def emit_as(self, expr, shape, dtype) -> relax.Expr:
        """The same, in this shape and dtype."""
        expr = self.emit(expr)
        if dtype_of(expr) != dtype:
            expr = self.builder.emit(relax.op.astype(expr, dtype))
        return reshaped(self.builder.emit, expr, shape)


def _describe(choice: TemplateChoice | str) -> dict:
    if isinstance(choice, str):
        return {"kernel": DEFAULT, "reason": choice, **NO_TIMES}
    return {
        "kernel": choice.template.NAME,
        "config": choice.config.label,  # type: ignore[attr-defined]  # every template's configurations have one
        "predicted_us": choice.predicted_us,
        "measured_us": choice.measured_us,
        "reason": choice.reason,
    }
