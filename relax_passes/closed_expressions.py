"""Expressions that depend on no input of the function, and their values: evaluated together in one LLVM program."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst, PrimExpr
from tvm.relax.expr import PrimValue, ShapeExpr, StringImm

from relax_passes.bindings import Bindings, operator, static_shape

IMPURE = ("call_", "random", "print", "assert_op")


class ClosedExpressions:
    """Tells which expressions of a function are closed, and evaluates them."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self._closed = {}  # variable -> bool
        for var, value in bindings.values.items():
            self._closed[var] = self._is_closed_value(value) and _is_static(var)

    def is_closed(self, expr) -> bool:
        """Whether `expr`, written in variables of the function, depends on constants only."""
        return self._is_closed_value(expr)

    def _is_closed_value(self, value) -> bool:
        if isinstance(value, relax.Var):
            return self._closed.get(value, False)
        if isinstance(value, GenericConst):
            return True
        if isinstance(value, relax.Tuple):
            return all(self._is_closed_value(field) for field in value.fields)
        if isinstance(value, relax.TupleGetItem):
            return self._is_closed_value(value.tuple_value)
        if operator(value) and not operator(value).startswith(IMPURE):
            return all(self._is_closed_value(arg) for arg in value.args)
        return isinstance(value, (ShapeExpr, PrimValue, StringImm, PrimExpr))

    def evaluate(self, exprs: list[relax.Expr]) -> list[np.ndarray]:
        """The values of closed expressions; bfloat16 comes out as float32."""
        values = [self.bindings.value(expr) for expr in exprs]
        computed = [expr for expr, value in zip(exprs, values) if not isinstance(value, GenericConst)]
        results = iter(_run(self._program(computed)) if computed else ())
        arrays = [value.value.numpy() if isinstance(value, GenericConst) else next(results) for value in values]
        return [array.astype(np.float32) if array.dtype.name == "bfloat16" else array for array in arrays]

    def _program(self, exprs) -> tvm.IRModule:
        needed, pending = set(), [var for expr in exprs for var in relax.analysis.free_vars(expr)]
        while pending:
            var = pending.pop()
            if var not in needed:
                needed.add(var)
                pending += relax.analysis.free_vars(self.bindings.values[var])
        builder = relax.BlockBuilder()
        renamed = {}
        with builder.function("main", []):
            with builder.dataflow():
                for var, value in self.bindings.values.items():
                    if var in needed:
                        renamed[var] = builder.emit(_rename(value, renamed))
                results = [builder.emit(_rename(expr, renamed)) for expr in exprs]
                output = builder.emit_output(relax.Tuple(results))
            builder.emit_func_output(output)
        return relax.transform.EliminateCommonSubexpr()(builder.finalize())


def _rename(expr, renamed):
    for var in relax.analysis.free_vars(expr):
        expr = tvm.relax.utils.copy_with_new_vars if False else expr
    return expr


def _is_static(var) -> bool:
    return isinstance(var.ty, relax.TupleType) or isinstance(var.ty, relax.ShapeType) or static_shape(var) is not None


def _run(program: tvm.IRModule) -> list[np.ndarray]:
    target = tvm.target.Target("llvm")
    with target:
        machine = relax.VirtualMachine(tvm.compile(program, target=target), tvm.cpu())
    return [result.numpy() for result in machine["main"]()]
