"""Sorts of rows where no template computes them: by the tensor expressions that define them, which count and search."""

import tvm
from tvm import relax, te

from relax_passes.ir.bindings import operator
from relax_passes.ir.operators.sorting import SORTING, problem_of_sorting
from tir_kernels.problems.registry import kind_of

OPAQUE = 8


def legalize_sorting(builder, call):
    """A call of the definition of one of the operators, as many steps as pairs of elements of a run."""
    function = te.create_prim_func(kind_of(problem_of_sorting(call)).tensors(problem_of_sorting(call)))
    function = function.with_attrs({"op_pattern": OPAQUE, "tirx.noalias": True})
    name = builder.add_func(function.without_attr("global_symbol"), operator(call))
    return relax.call_tir(name, list(call.args), list(call.ty.fields))


for _name in SORTING:  # for TVM's own passes, which evaluate constants
    tvm.ir.register_op_attr(f"relax.{_name}", "FLegalize", legalize_sorting)
SORTS = {f"relax.{name}": legalize_sorting for name in SORTING}
