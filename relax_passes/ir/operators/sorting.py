"""Relax operators that sort rows as this project's kernels do: run by run, and then by merging runs.

    sort_runs(x)              x (rows, n)               →  values, order (rows, kept), [ranks (rows, n)]
    merge_runs(values, order)   both (rows, n), in runs   →  the same of longer runs

The attributes are the fields of their problems (tir_kernels/fusion/sorting/problem.py) that no argument has.  TVM has
no such operators, so this module registers them.
"""

import tvm
from tvm import relax
from tvm.ir import _ffi_api

from relax_passes.ir.bindings import dtype_of, operator, shape_of
from tir_kernels.fusion.sorting.problem import MergeProblem, SortProblem

SORTING: dict[str, type] = {"sort_runs": SortProblem, "merge_runs": MergeProblem}


def sorting_call(problem: SortProblem | MergeProblem, *arguments) -> relax.Call:
    """The call of the operator that computes a problem; its result is a tuple."""
    (name,) = (name for name, kind in SORTING.items() if isinstance(problem, kind))
    attributes = {
        "run": problem.run,
        "keep": problem.keep,
        "descending": int(problem.descending),
        "order_dtype": problem.order_dtype,
        "ranks": int(problem.ranks),
    }
    return relax.Call(tvm.ir.Op.get(f"relax.{name}"), list(arguments), tvm.ir.make_node("ir.DictAttrs", **attributes))


def problem_of_sorting(call: relax.Call) -> SortProblem | MergeProblem:
    """The problem of a call of one of the operators."""
    (rows, n), attrs = shape_of(call.args[0]), call.attrs
    return SORTING[operator(call)](
        rows,
        n,
        int(attrs["run"]),
        int(attrs["keep"]),
        dtype_of(call.args[0]),
        bool(int(attrs["descending"])),
        str(attrs["order_dtype"]),
        bool(int(attrs["ranks"])),
    )


def _infer_type(call, _context):
    problem = problem_of_sorting(call)
    for argument, (shape, dtype) in zip(call.args, problem.inputs, strict=True):
        if (shape_of(argument), dtype_of(argument)) != (shape, dtype):
            raise ValueError(f"{operator(call)} of {argument.ty}, which must be {dtype} {shape}")
    return relax.TupleType([relax.TensorType(shape, dtype) for shape, dtype in problem.outputs])


for _name in SORTING:
    _ffi_api.RegisterOp(f"relax.{_name}", "Rows sorted in runs.")
    tvm.ir.register_op_attr(f"relax.{_name}", "FInferType", _infer_type)
    tvm.ir.register_op_attr(f"relax.{_name}", "FPurity", True)
