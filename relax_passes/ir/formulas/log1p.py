"""log1p(x), which Relax has no operator for, written and recognised here: log(1 + x) loses the digits of a small x.

    |x| < 0.35 ? 2 atanh(x / (2 + x)) : log(1 + x)

with the series of atanh.
"""

from tvm import relax

from relax_passes.ir.bindings import Bindings, dtype_of
from relax_passes.ir.formulas.written import is_written_as

NEAR = 0.35
TERMS, TERMS_OF_DOUBLES = 6, 11

op = relax.op


def emit_log1p(emit, x) -> relax.Var:
    """log(1 + x) of a floating-point tensor."""
    number = lambda value: relax.const(value, dtype_of(x))
    near = emit(op.where(emit(op.less(emit(op.abs(x)), number(NEAR))), x, number(0.0)))
    ratio = emit(op.divide(near, emit(op.add(number(2.0), near))))
    square = emit(op.multiply(ratio, ratio))
    count = TERMS_OF_DOUBLES if dtype_of(x) == "float64" else TERMS
    series = number(2 / (2 * count - 1))
    for n in reversed(range(count - 1)):
        series = emit(op.add(emit(op.multiply(series, square)), number(2 / (2 * n + 1))))
    far = emit(op.log(emit(op.add(number(1.0), x))))
    return emit(op.where(emit(op.less(emit(op.abs(x)), number(NEAR))), emit(op.multiply(series, ratio)), far))


def match_log1p(bindings: Bindings, expr) -> relax.Expr | None:
    """x if `expr` is what `emit_log1p` writes for it, else None."""
    call = bindings.call(expr, "where")
    test = None if call is None else bindings.call(call.args[0], "less")
    size = None if test is None else bindings.call(test.args[0], "abs")
    if size is None or not is_written_as(bindings, expr, emit_log1p, size.args[0]):
        return None
    return size.args[0]
