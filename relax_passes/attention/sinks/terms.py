"""Sinks in sums of exponentials: the exponential of a logit, relative to the same maximum, is added to the sum.

    sum(exp(s - m)) + exp(sink - m)        … + exp(-m)        sum(exp(s)) + exp(sink)        … + 1

Anything else that is added, such as a small number beside exponentials relative to a maximum, is no sink.
"""

from dataclasses import replace

from relax_passes.attention.sinks.logits import Sink, logits_of
from relax_passes.attention.spellings.row_maxima import Shift
from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.same_values import bare, same


def sink_term(bindings: Bindings, term, total, shift: Shift, scores) -> Sink | None:
    """The sink whose exponential is `term`, added to `total`, the sum of each row's exponentials; else None."""
    lead, shape = shape_of(scores)[:-1], static_shape(total)
    if shape not in ((*lead, 1), lead):
        return None
    trailing = len(lead) + 1 - len(shape)
    if shift.expr is None:
        return _unshifted(bindings, term, lead, trailing)
    exponential = bindings.call(bare(bindings, term), "exp")
    if exponential is None or static_shape(term) != shape or static_shape(exponential) not in ((*lead, 1), lead):
        return None
    call = bindings.value(exponential.args[0])
    trailing = len(lead) + 1 - len(shape_of(call))
    top = bare(bindings, shift.expr)
    if operator(call) == "negative":
        return Sink(0.0) if same(bindings, bare(bindings, call.args[0]), top) else None
    if operator(call) != "subtract" or not same(bindings, bare(bindings, call.args[1]), top):
        return None
    if static_shape(call.args[1]) != static_shape(call):
        return None
    return logits_of(bindings, call.args[0], lead[:-1], trailing)


def _unshifted(bindings, term, lead, trailing) -> Sink | None:
    if bindings.scalar(term) == 1.0:
        return Sink(0.0)
    spread = logits_of(bindings, term, lead[:-1], trailing)
    if spread is None or isinstance(spread.logits, float):
        return None
    exponential = bindings.call(bare(bindings, spread.logits), "exp")
    if exponential is None:
        return None
    (exponent,) = exponential.args
    sink = logits_of(bindings, exponent, lead[:-1], len(lead) + 1 - len(shape_of(exponent)))
    return sink or replace(spread, logits=exponent)
