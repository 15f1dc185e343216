"""The logarithm of a softmax's denominator, with or without a sink in it.

log(sum(exp(s - m))) + m        log(sum(exp(s)))        with a sink's exponential in the sum, or one more column of s
logaddexp(logsumexp(s), sink)                           log1p(sum(exp(s))), whose sink is 0
"""

from dataclasses import dataclass

from relax_passes.attention.sinks.logits import Sink, column_beside, logits_of, same_sink
from relax_passes.attention.sinks.terms import sink_term
from relax_passes.attention.spellings.row_maxima import Shift, find_shift, reduces_last
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.formulas.log1p import match_log1p
from relax_passes.ir.formulas.log_add_exp import match_log_add_exp
from relax_passes.ir.same_values import as_precise, bare, narrowest, same, same_numbers


@dataclass(frozen=True)
class LogSumExp:
    """A log-sum-exp l of scores s: its sink, and the result of exp(s - l) in a row of nothing but -inf.

    `empty_rows`, this result, is "nan" or "zero".
    """

    sink: Sink | None
    empty_rows: str


def find_log_sum_exp(bindings: Bindings, expr, scores) -> LogSumExp | None:
    """The log-sum-exp of each row of `scores` that `expr`, a column beside them, is; None if it is none."""
    shape = static_shape(scores)
    if shape is None or static_shape(expr) != (*shape[:-1], 1):
        return None
    return _find(bindings, expr, scores)


def _find(bindings, expr, scores) -> LogSumExp | None:
    expr, lead = as_precise(bindings, expr, _born(bindings, scores)), shape_of(scores)[:-1]
    if static_shape(expr) not in ((*lead, 1), lead):
        return None
    pair = match_log_add_exp(bindings, expr)
    if pair is not None:
        return _added(bindings, expr, pair, scores)
    one_more = match_log1p(bindings, expr)
    if one_more is not None:
        found = _of_sum(bindings, one_more, None, scores)
        return LogSumExp(Sink(0.0), "zero") if found is not None and found.sink is None else None
    call, shift = bindings.value(expr), None
    if operator(call) == "add":
        parts = [as_precise(bindings, x, _born(bindings, scores)) for x in call.args]
        logs = [i for i in (0, 1) if bindings.call(parts[i], "log") is not None]
        if len(logs) != 1:
            return None
        shift, call = call.args[1 - logs[0]], bindings.value(parts[logs[0]])
    return _of_sum(bindings, call.args[0], shift, scores) if operator(call) == "log" else None


def _born(bindings, scores) -> str:
    """The dtype of the scores before they were cast to a wider one."""
    return dtype_of(narrowest(bindings, scores))


def _added(bindings, expr, pair, scores) -> LogSumExp | None:
    """logaddexp of the log-sum-exp of the scores alone and a sink."""
    lead, trailing = shape_of(scores)[:-1], len(shape_of(scores)) - len(shape_of(expr))
    for part, other in (pair, reversed(pair)):
        found = _find(bindings, part, scores) if static_shape(part) == static_shape(expr) else None
        if found is not None and found.sink is None:
            sink = logits_of(bindings, other, lead[:-1], trailing)
            return None if sink is None else LogSumExp(sink, "zero")
    return None


def _of_sum(bindings, total, shift, scores) -> LogSumExp | None:
    """The log-sum-exp that is log(total), plus `shift` if it is given; None if this is no log-sum-exp of the scores."""
    dtype = _born(bindings, scores)
    outer = as_precise(bindings, total, dtype)
    for part, term in ((outer, None), *_summands(bindings, outer)):
        call = bindings.value(as_precise(bindings, part, dtype))
        if operator(call) != "sum" or not reduces_last(call):
            continue
        exponentials = bindings.call(as_precise(bindings, call.args[0], dtype), "exp")
        if exponentials is None:
            continue
        found = _taken_off(bindings, exponentials.args[0], shift)
        if found is None:
            continue
        inner, taken_off = found
        if not same_numbers(bindings, inner, scores):
            column = column_beside(bindings, narrowest(bindings, inner), scores)
            return None if column is None or term is not None else LogSumExp(column, "zero")
        if term is None:
            is_plain = taken_off.sink is None or taken_off.is_guarded
            return LogSumExp(None, "nan") if is_plain else None
        sink = sink_term(bindings, term, part, taken_off, scores)
        if sink is None:
            return None
        if taken_off.sink is not None and not (taken_off.is_guarded or same_sink(bindings, taken_off.sink, sink)):
            return None
        return LogSumExp(sink, "nan" if taken_off.is_maximum else "zero")
    return None


def _summands(bindings, expr):
    call = bindings.call(expr, "add")
    if call is None:
        return []
    pairs = (tuple(call.args), tuple(reversed(call.args)))
    return [(a, b) for a, b in pairs if static_shape(a) == static_shape(call)]


def _taken_off(bindings, exponent, shift):
    """(scores, Shift) of an exponent; None unless the exponent subtracts the `shift` that is added to the logarithm."""
    if shift is None:
        return exponent, Shift()
    call = bindings.call(exponent, "subtract")
    if call is None or not same(bindings, bare(bindings, call.args[1]), bare(bindings, shift)):
        return None
    found = find_shift(bindings, call.args[1], call.args[0])
    return None if found is None else (call.args[0], found)
