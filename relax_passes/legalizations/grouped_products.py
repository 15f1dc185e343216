"""Grouped products where no template computes them: as tensor expressions, which rules for CPUs and GPUs schedule.

The function keeps its problem as attribute `stof.grouped`, for these rules to recognise it: the expressions say for
each element which weight it is multiplied by, and hide that rows of one group share it.
"""

import tvm
from tvm import relax, te
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import operator
from relax_passes.ir.operators.grouped_products import GROUPED, grouped_product, problem_of_call
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.problems import grouped

PROBLEM = "stof.grouped"  # attribute of a PrimFunc: the layout of the weights
OPAQUE = 8


def problem_of_function(function: tvm.tirx.PrimFunc) -> GroupedProblem | None:
    """The problem of a function that `legalize_grouped` made, None for any other."""
    if PROBLEM not in (function.attrs or {}):
        return None
    a, w, offsets, out = (param.ty for param in function.params)
    (m, k), (_, n) = ([int(size) for size in x.shape] for x in (a, out))
    layout = str(function.attrs[PROBLEM])
    return GroupedProblem(m, n, k, int(offsets.shape[0]), str(a.dtype), layout, str(offsets.dtype))


def legalize_grouped(builder, call):
    """A call of the expressions of `tir_kernels/problems/grouped.py`, after a gather of rows chosen at run time."""
    if len(call.args) > 3:
        call = _after_gather(builder, call)
    problem = problem_of_call(call)
    function = te.create_prim_func(grouped.tensors(problem))
    function = function.with_attrs({PROBLEM: problem.w_layout, "op_pattern": OPAQUE, "tirx.noalias": True})
    name = builder.add_func(function.without_attr("global_symbol"), operator(call))
    return relax.call_tir(name, list(call.args), call.ty)


def legalize_with_rows_along_k(builder, call):
    """The same, with constant weights transposed where they are (groups, k, n): a CPU adds up along k faster."""
    if len(call.args) > 3:
        call = _after_gather(builder, call)
    a, w, offsets = call.args
    if operator(call) == "grouped_matmul" and isinstance(w, GenericConst):
        transposed = builder.normalize(relax.op.permute_dims(w, [0, 2, 1]))
        w = builder.emit(transposed.op.get_attr("FLegalize")(builder, transposed))
        call = builder.normalize(grouped_product(a, w, offsets, "nk"))
    return legalize_grouped(builder, call)


def _after_gather(builder, call):
    """The call of a product of rows in their order, with the gather before it."""
    a, w, offsets, rows = call.args
    take = builder.normalize(relax.op.take(a, rows, axis=0, mode="nan"))
    gathered = builder.emit(take.op.get_attr("FLegalize")(builder, take))
    return builder.normalize(grouped_product(gathered, w, offsets, GROUPED[operator(call)]))


for _name in GROUPED:  # for TVM's own passes, which evaluate constants
    tvm.ir.register_op_attr(f"relax.{_name}", "FLegalize", legalize_grouped)
GROUPED_PRODUCTS = {f"relax.{name}": legalize_grouped for name in GROUPED}
CPU_GROUPED_PRODUCTS = {f"relax.{name}": legalize_with_rows_along_k for name in GROUPED}
