"""log(exp(a) + exp(b)), which Relax has no operator for: written and recognised here.

    large = a >= b ? a : b        small = a >= b ? b : a        d = exp(small - large)        u = 1 + d
    a == b ? a + log(2) : large + (log(u) + (d - (u - 1)) / u)

The quotient restores what rounding took from u, so that nothing is lost where d is small.  The case a == b is apart
because equal infinities have no difference.  Comparisons with NaN are false, and the result is NaN.
"""

import math

from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of
from relax_passes.ir.formulas.written import is_written_as

op = relax.op


def emit_log_add_exp(emit, a, b) -> relax.Var:
    """log(exp(a) + exp(b)) of two floating-point tensors of one dtype, which broadcast."""
    number = lambda x: relax.const(x, dtype_of(a))
    first = emit(op.greater_equal(a, b))
    large, small = emit(op.where(first, a, b)), emit(op.where(first, b, a))
    part = emit(op.exp(emit(op.subtract(small, large))))
    total = emit(op.add(number(1.0), part))
    lost = emit(op.subtract(part, emit(op.subtract(total, number(1.0)))))
    logarithm = emit(op.add(emit(op.log(total)), emit(op.divide(lost, total))))
    twice = emit(op.add(a, number(math.log(2.0))))
    return emit(op.where(emit(op.equal(a, b)), twice, emit(op.add(large, logarithm))))


def match_log_add_exp(bindings: Bindings, expr) -> tuple[relax.Expr, relax.Expr] | None:
    """(a, b) if `expr` is what `emit_log_add_exp` writes for them, else None."""
    call = bindings.call(expr, "where")
    test = None if call is None else bindings.call(call.args[0], "equal")
    if call is None or test is None:
        return None
    pair = tuple(test.args)
    return pair if is_written_as(bindings, expr, emit_log_add_exp, *pair) else None
