"""Softmax in all its forms: one operator, exp and sum, exp and log_softmax, or exp and logsumexp.

    softmax(s)        exp(log_softmax(s))        exp(s - logsumexp(s))
    e / sum(e)        (e @ v) / sum(e)           with e = exp(s - max(s)), or e = exp(s)

A number that is subtracted from all scores of a row cancels.  It is the row's maximum, which may be bounded from below,
or replaced where it is infinite.  The forms differ in rows without any finite score, and in rows where exp gives only
0: `Softmax` has the results of such rows.  A sink may be in the sum, or in the logsumexp (sinks/terms.py,
log_sum_exp.py).
"""

from dataclasses import dataclass

from tvm import relax

from relax_passes.attention.sinks.log_sum_exp import find_log_sum_exp
from relax_passes.attention.sinks.logits import Sink, same_sink
from relax_passes.attention.sinks.terms import sink_term
from relax_passes.attention.spellings.row_maxima import Shift, find_shift, reduces_last
from relax_passes.attention.spellings.steps import NotAttention
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.floats import FLOATS
from relax_passes.ir.same_values import same

EPSILON = 1e-6  # added to a sum of at least 1, it is no more than rounding


@dataclass(frozen=True)
class Softmax:
    """Weights over the last dimension of `scores`.

    weights : the variable that holds them, not yet divided by their sum if `divided` is set
    divided : the variable bound to the product with v divided by the sum, or None
    summed : the reader of the weights from which that sum is computed, or None
    empty_rows : the result in a row of nothing but -inf, "nan" or "zero"
    vanishes : whether a row of finite scores far below 0 gives this result, too, because its maximum is not subtracted
    raised : the largest number to which a row's maximum is raised before it is subtracted, or 0
    sink : the logit of each head in the sum, or None
    subtracts_log_sum : whether a row's log-sum-exp is subtracted from its scores; huge scores lose the sum's logarithm
    """

    call: relax.Call
    scores: relax.Expr
    weights: relax.Var
    divided: relax.Var | None = None
    summed: relax.Var | None = None
    empty_rows: str = "nan"
    vanishes: bool = False
    raised: float = 0.0
    sink: Sink | None = None
    subtracts_log_sum: bool = False


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
    if operator(inner) == "subtract" and (found := find_log_sum_exp(bindings, inner.args[1], inner.args[0])):
        empty, sink = found.empty_rows, found.sink
        return Softmax(call, inner.args[0], var, empty_rows=empty, sink=sink, subtracts_log_sum=True)
    return _by_sum(bindings, var, call, inner)


def _by_sum(bindings, var, call, inner) -> Softmax | None:
    """The softmax if the exponentials `var` are divided by their sum, before or after the product with v; else None."""
    sums = [(r, total) for r in bindings.readers[var] if (total := _sum_over_last(bindings, r, var)) is not None]
    if len(sums) != 1:
        return None
    ((summed, total),) = sums
    scores, shift = call.args[0], Shift()
    if operator(inner) == "subtract" and (found := find_shift(bindings, *reversed(inner.args))) is not None:
        scores, shift = inner.args[0], found
    denominator = _division(bindings, total, shift, scores)
    if denominator is None:
        return None
    division, guards, sink = denominator
    if static_shape(bindings.value(division).args[1]) != (*shape_of(call)[:-1], 1):
        return None
    is_exact = shift.is_maximum
    if shift.sink is not None:
        is_exact = sink is not None and same_sink(bindings, shift.sink, sink)
        if not (is_exact or shift.is_guarded):
            raise NotAttention("its exponentials are relative to the maximum of other scores than its sum is of")
    if guards and not is_exact and any(kind != "zero" for kind, _ in guards):
        raise NotAttention("its sum of exponentials is kept from 0, and no maximum is taken off the scores")
    if sink is not None and any(kind == "maximum" for kind, _ in guards):
        raise NotAttention("its sum of exponentials is kept from 0 beside a sink")
    empty = "zero" if guards and not is_exact or sink is not None and not shift.is_maximum else "nan"
    known = dict(empty_rows=empty, vanishes=not is_exact, raised=shift.largest, sink=sink)
    numerator = bindings.value(division).args[0]
    if same(bindings, numerator, var):
        readers = {*bindings.readers[var]} - {summed, division}
        if readers or var in bindings.outputs:
            raise NotAttention("its exponentials have another reader or are an output of the model")
        return Softmax(call, scores, division, **known)
    return Softmax(call, scores, var, division, summed, **known)


def _division(bindings, total, shift, scores):
    """(the variable of x / total, guards (kind, number) that keep total from 0, the sink added to total), or None."""
    guards, sink = [], None
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
        if name == "divide" and same(bindings, call.args[1], total):
            return None if same(bindings, call.args[0], total) else (readers[0], guards, sink)
        if name in ("add", "maximum"):
            other = call.args[1] if same(bindings, call.args[0], total) else call.args[0]
            number = bindings.scalar(other)
            if number is not None and 0 < number <= (EPSILON if name == "add" else 1.0):
                guards.append((name, number))
            elif name == "add" and sink is None and static_shape(call) == static_shape(total):
                sink = sink_term(bindings, other, total, shift, scores)
                if sink is None:
                    return None
            else:
                return None
        elif not (bindings.same_elements(call) is not None or name == "astype" and dtype_of(call) in FLOATS):
            return None
        total = readers[0]


def _replaces_zero(bindings, test, choice, total) -> bool:
    equal, where = bindings.value(test), bindings.value(choice)
    if operator(where) != "where" or not same(bindings, where.args[0], test):
        return False
    is_zero = bindings.scalar(equal.args[1]) == 0 and same(bindings, equal.args[0], total)
    return is_zero and bindings.scalar(where.args[1]) == 1 and same(bindings, where.args[2], total)


def _sum_over_last(bindings, reader, var):
    """The variable of each row's sum of `var`: `reader`, or the only reader of the cast `reader`; else None."""
    call = bindings.value(reader)
    if operator(call) == "astype" and dtype_of(call) in FLOATS and len(bindings.readers[reader]) == 1:
        var, reader = reader, bindings.readers[reader][0]
        call = bindings.value(reader)
    is_sum = operator(call) == "sum" and same(bindings, call.args[0], var) and reduces_last(call)
    return reader if is_sum else None
