"""Masks and biases that are computed from the scores that they mask, as that of the largest few of a row.

A given mask drops scores in the softmax only.  What a model chooses among all scores of a row would be chosen among
those that are dropped, too.  The scores may be computed once more for it.
"""

from collections.abc import Callable

from tvm import relax

from relax_passes.attention.refusals.stray_weights import CONTRACTIONS
from relax_passes.attention.spellings.patterns import AttentionMatch
from relax_passes.ir.bindings import Bindings, operator

OWN_SCORES = "its mask is computed from its scores, as that of the largest few"


def is_masked_by_scores(bindings: Bindings, match: AttentionMatch, is_closed: Callable) -> bool:
    """Whether a mask or bias of a match is computed from a product of its queries and keys."""
    sides = [_source(bindings, x, is_closed) for x in (match.q, match.k)]
    given = [step.operand for step in match.form.steps if step.operand is not None and step.kind != "shift"]
    return any(
        call.same_as(match.scores) or _multiplies(bindings, call, sides, is_closed)
        for operand in given
        for call in bindings.values_before(operand)
    )


def _multiplies(bindings: Bindings, call, sides: list, is_closed: Callable) -> bool:
    """Whether a contraction has an operand that is made of each of the two sides alone."""
    if operator(call) not in CONTRACTIONS:
        return False
    sources = [_source(bindings, x, is_closed) for x in bindings.operands(call)]
    for side in sides:
        found = next((i for i, source in enumerate(sources) if source.same_as(side)), None)
        if found is None:
            return False
        del sources[found]
    return True


def _source(bindings: Bindings, expr, is_closed: Callable):
    """What an expression is made of by operators that read nothing else that is given at run time: views, factors."""
    while True:
        call = bindings.value(expr)
        if not isinstance(call, relax.Call | relax.TupleGetItem) or operator(call) in CONTRACTIONS:
            return expr
        read = [var for var in relax.analysis.free_vars(call) if not is_closed(var)]
        if len(read) != 1:
            return expr
        expr = read[0]
