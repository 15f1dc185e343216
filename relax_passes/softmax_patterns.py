"""Softmax however it is spelled: whole, by exp and sum, by exp and log_softmax, or by exp and logsumexp.

    softmax(s)        exp(log_softmax(s))        exp(s - logsumexp(s))
    e / sum(e)        (e @ v) / sum(e)           with e = exp(s - max(s)), or e = exp(s)

A row's own number taken off the scores cancels: the maximum, cut off below or replaced where it is infinite.  What
differs is a row without any finite score, and a row of which exp leaves nothing: `Softmax` says what these give.
"""

from dataclasses import dataclass

from tvm import relax

from relax_passes.attention_steps import FLOATS, NotAttention
from relax_passes.bindings import Bindings, dtype_of, operator, shape_of, static_shape

EPSILON = 1e-6  # added to a sum of at least 1, it is no more than rounding


@dataclass(frozen=True)
class Softmax:
    """Weights over the last dimension of `scores`.

    weights : the variable that holds them, not yet divided by their sum if `divided` is set
    divided : the variable bound to the product with v divided by the sum, or None
    summed : the reader of the weights that leads to this sum, or None
    empty_rows : what a row of nothing but -inf gives, "nan" or "zero"
    vanishes : whether a row of finite scores far below 0 gives that, too: no maximum is taken off
    """

    call: relax.Call
    scores: relax.Expr
    weights: relax.Var
    divided: relax.Var | None = None
    summed: relax.Var | None = None
    empty_rows: str = "nan"
    vanishes: bool = False


def find_softmax(bindings: Bindings, var: relax.Var) -> Softmax | None:
    """The softmax whose whole operator, or whose exponential, `var` is bound to.

    Raises NotAttention where exponentials are divided by their sum, but not as a softmax does.
    """
    call = bindings.value(var)
    if operator(call) == "nn.softmax":
        return Softmax(call, call.args[0], var)
    if operator(call) != "exp" or static_shape(call) is None or dtype_of(call) not in FLOATS:
        return None
    inner = bindings.value(call.args[0])
    if operator(inner) == "nn.log_softmax" and int(inner.attrs.axis) in (-1, len(shape_of(inner)) - 1):
        return Softmax(inner, inner.args[0], var)
    if operator(inner) == "subtract" and _is_log_sum_exp(bindings, inner.args[1], inner.args[0]):
        return Softmax(call, inner.args[0], var)
    return _by_sum(bindings, var, call, inner)


def is_row_maximum(bindings: Bindings, expr, scores) -> bool:
    """Whether `expr` (…, 1) is exactly the largest of each row of `scores`."""
    shape = static_shape(scores)
    if shape is None or static_shape(expr) != (*shape[:-1], 1):
        return False
    expr = _uncast(bindings, expr)
    if (inner := bindings.same_elements(expr)) is not None:  # the dimension of 1 that the maximum left out
        expr = _uncast(bindings, inner)
    value = _projected(bindings, expr)
    if operator(value) == "max":
        return _reduces_last(value) and _same_numbers(bindings, value.args[0], scores)
    if isinstance(value, relax.TupleGetItem) and int(value.index) == 0:
        top = bindings.value(value.tuple_value)
        if operator(top) == "topk" and int(top.attrs.k) == 1 and bool(top.attrs.largest):
            last = int(top.attrs.axis) in (-1, len(shape_of(scores)) - 1)
            return last and _same_numbers(bindings, top.args[0], scores)
    return False


def _by_sum(bindings, var, call, inner) -> Softmax | None:
    """exp of scores that are divided by their sum, before or after the product with v."""
    sums = [(r, total) for r in bindings.readers[var] if (total := _sum_over_last(bindings, r, var)) is not None]
    if len(sums) != 1:
        return None
    ((summed, total),) = sums
    found = _division(bindings, total)
    if found is None:
        return None
    division, guards = found
    if static_shape(bindings.value(division).args[1]) != (*shape_of(call)[:-1], 1):
        return None
    scores, is_exact, vanishes = call.args[0], False, True
    if operator(inner) == "subtract":
        if is_row_maximum(bindings, inner.args[1], inner.args[0]):
            scores, is_exact, vanishes = inner.args[0], True, False
        elif _is_guarded_maximum(bindings, inner.args[1], inner.args[0]):
            scores = inner.args[0]
    if guards and not is_exact and any(kind != "zero" for kind, _ in guards):
        raise NotAttention("its sum of exponentials is kept from 0, and no maximum is taken off the scores")
    empty = "zero" if guards and not is_exact else "nan"
    numerator = bindings.value(division).args[0]
    if _same(bindings, numerator, var):
        readers = {*bindings.readers[var]} - {summed, division}
        if readers or var in bindings.outputs:
            raise NotAttention("its exponentials have another reader or are an output of the model")
        return Softmax(call, scores, division, None, None, empty, vanishes)
    return Softmax(call, scores, var, division, summed, empty, vanishes)


def _division(bindings, total):
    """(the variable of x / total, what keeps the total from 0 as (kind, number)), or None."""
    guards = []
    while True:
        readers = [*dict.fromkeys(bindings.readers[total])]
        if total in bindings.outputs:
            return None
        if len(readers) == 2:  # where(total == 0, 1, total)
            tests = [r for r in readers if operator(bindings.value(r)) == "equal"]
            readers = [r for r in readers if r not in tests]
            if len(tests) != 1 or not _replaces_zero(bindings, tests[0], readers[0], total):
                return None
            guards.append(("zero", 0.0))
            total = readers[0]
            continue
        if len(readers) != 1:
            return None
        call = bindings.value(readers[0])
        name = operator(call)
        if name == "divide" and _same(bindings, call.args[1], total):
            return None if _same(bindings, call.args[0], total) else (readers[0], guards)
        if name in ("add", "maximum"):
            other = call.args[1] if _same(bindings, call.args[0], total) else call.args[0]
            number = bindings.scalar(other)
            if number is None or not 0 < number <= (EPSILON if name == "add" else 1.0):
                return None
            guards.append((name, number))
        elif not (bindings.same_elements(call) is not None or name == "astype" and dtype_of(call) in FLOATS):
            return None
        total = readers[0]


def _replaces_zero(bindings, test, choice, total) -> bool:
    equal, where = bindings.value(test), bindings.value(choice)
    if operator(where) != "where" or not _same(bindings, where.args[0], test):
        return False
    is_zero = bindings.scalar(equal.args[1]) == 0 and _same(bindings, equal.args[0], total)
    return is_zero and bindings.scalar(where.args[1]) == 1 and _same(bindings, where.args[2], total)


def _is_log_sum_exp(bindings, expr, scores) -> bool:
    """log(sum(exp(scores - m))) + m with a row's own m, or without one, as a column beside the scores."""
    shape = static_shape(scores)
    if shape is None or static_shape(expr) != (*shape[:-1], 1):
        return False
    call = bindings.value(_bare(bindings, expr))
    shift = None
    if operator(call) == "add":
        logs = [i for i in (0, 1) if bindings.call(call.args[i], "log") is not None]
        if len(logs) != 1:
            return False
        shift, call = call.args[1 - logs[0]], bindings.value(call.args[logs[0]])
    if operator(call) != "log" or (total := bindings.call(call.args[0], "sum")) is None or not _reduces_last(total):
        return False
    exponentials = bindings.call(total.args[0], "exp")
    if exponentials is None:
        return False
    if shift is None:
        return _same(bindings, exponentials.args[0], scores)
    shifted = bindings.call(exponentials.args[0], "subtract")
    if shifted is None or not _same(bindings, shifted.args[0], scores):
        return False
    top = shifted.args[1]
    is_taken_off = is_row_maximum(bindings, top, scores) or _is_finite_maximum(bindings, top, scores)
    return is_taken_off and _same(bindings, _bare(bindings, top), _bare(bindings, shift))


def _bare(bindings, expr):
    """`expr` before reshapes."""
    while (inner := bindings.same_elements(expr)) is not None:
        expr = inner
    return expr


def _is_finite_maximum(bindings, expr, scores) -> bool:
    """A row's maximum that a where replaces by a number in some rows, as logsumexp does where it is infinite."""
    return bindings.call(expr, "where") is not None and _is_guarded_maximum(bindings, expr, scores)


def _is_guarded_maximum(bindings, expr, scores) -> bool:
    """A row's maximum that was raised to a number, or replaced by one in some rows: a number of each row's own."""
    call = bindings.value(expr)
    if operator(call) == "where":
        parts = [x for x in call.args[1:] if bindings.scalar(x) is None]
    elif operator(call) in ("maximum", "astype"):
        parts = [x for x in call.args if bindings.scalar(x) is None]
    else:
        return False
    if static_shape(call) is None or shape_of(call)[-1] != 1 or len(parts) != 1 or dtype_of(parts[0]) not in FLOATS:
        return False
    return is_row_maximum(bindings, parts[0], scores) or _is_guarded_maximum(bindings, parts[0], scores)


def _sum_over_last(bindings, reader, var):
    """The variable of the sum of each row of `var` that `reader` is, or that alone reads this cast of `var`."""
    call = bindings.value(reader)
    if operator(call) == "astype" and dtype_of(call) in FLOATS and len(bindings.readers[reader]) == 1:
        var, reader = reader, bindings.readers[reader][0]
        call = bindings.value(reader)
    is_sum = operator(call) == "sum" and _same(bindings, call.args[0], var) and _reduces_last(call)
    return reader if is_sum else None


def _reduces_last(call) -> bool:
    rank = len(call.args[0].ty.shape)
    axes = None if call.attrs.axis is None else [int(axis) % rank for axis in call.attrs.axis]
    return axes == [rank - 1]


def _projected(bindings, expr):
    """What `expr` is bound to, through tuples that are built and taken apart again."""
    value = bindings.value(expr)
    while isinstance(value, relax.TupleGetItem):
        fields = bindings.value(value.tuple_value)
        if not isinstance(fields, relax.Tuple):
            break
        value = bindings.value(fields.fields[int(value.index)])
    return value


def _uncast(bindings, expr):
    """`expr` before casts among floats, which keep the order of numbers."""
    while (call := bindings.call(expr, "astype")) is not None and {dtype_of(call), dtype_of(call.args[0])} <= {*FLOATS}:
        expr = call.args[0]
    return expr


def _same_numbers(bindings, a, b) -> bool:
    return _same(bindings, _uncast(bindings, a), _uncast(bindings, b))


def _same(bindings, a, b) -> bool:
    return bindings.value(a).same_as(bindings.value(b))
