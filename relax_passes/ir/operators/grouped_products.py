"""Relax operators for grouped products: rows that are sorted by group, and a weight for each group.

    grouped_matmul(a, w, offsets)     a (m, k), w (groups, k, n)  →  (m, n) in a's dtype
    grouped_linear(a, w, offsets)     the same for w (groups, n, k), as torch.nn.Linear has its weights

offsets (groups,) are integers: the cumulative ends of groups.  Rows from the last offset on are 0.  With a fourth
argument, integers `rows` (m,), the rows are a[rows], NaN where there is no such row.  TVM has no such operators, so
this module registers them.
"""

from dataclasses import replace

import tvm
from tvm import relax
from tvm.ir import _ffi_api

from relax_passes.ir.bindings import dtype_of, operator, shape_of
from tir_kernels.fusion.grouped.problem import GroupedProblem

GROUPED = {"grouped_matmul": "kn", "grouped_linear": "nk"}  # from an operator to its weights' layout


def grouped_product(a, w, offsets, w_layout: str, rows=None) -> relax.Call:
    """The call of the operator whose weights have a layout, "kn" or "nk"."""
    (name,) = (name for name, layout in GROUPED.items() if layout == w_layout)
    return relax.Call(tvm.ir.Op.get(f"relax.{name}"), [a, w, offsets] + ([] if rows is None else [rows]))


def problem_of_call(call: relax.Call) -> GroupedProblem:
    """The problem of a call of one of the operators."""
    a, _, offsets, *rows = call.args
    (a_rows, k), (m, n), layout = shape_of(a), shape_of(call), GROUPED[operator(call)]
    problem = GroupedProblem(m, n, k, shape_of(offsets)[0], dtype_of(a), layout, dtype_of(offsets))
    return replace(problem, gathered_from=a_rows, rows_dtype=dtype_of(rows[0])) if rows else problem


def _register(name: str, w_layout: str) -> None:
    def infer_type(call, _context):
        a, w, offsets, *rows = call.args
        (m, k), (groups, *matrix) = shape_of(a), shape_of(w)
        (m,) = shape_of(rows[0]) if rows else (m,)
        n, w_k = matrix if w_layout == "nk" else matrix[::-1]
        if (w_k, shape_of(offsets)) != (k, (groups,)) or str(a.ty.dtype) != str(w.ty.dtype):
            raise ValueError(f"{name} of a {a.ty}, w {w.ty} and offsets {offsets.ty}")
        return relax.TensorType([m, n], a.ty.dtype)

    _ffi_api.RegisterOp(f"relax.{name}", "A product of sorted rows with the weight of each row's group.")
    tvm.ir.register_op_attr(f"relax.{name}", "FInferType", infer_type)
    tvm.ir.register_op_attr(f"relax.{name}", "FPurity", True)


for _name, _layout in GROUPED.items():
    _register(_name, _layout)
