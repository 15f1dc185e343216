"""Sinks: a logit of each head that is one more column of the scores, and whose weight is thrown away after the softmax.

softmax(concat(scores, sink))[..., :-1] @ v        the row's maximum taken off first, or not
"""

from dataclasses import dataclass, replace

from tvm import relax

from relax_passes.attention_steps import FLOATS, NotAttention, comes_from_product, keeps_precision
from relax_passes.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.softmax_patterns import Softmax, is_row_maximum


@dataclass(frozen=True)
class Sink:
    """A float expression of `heads` elements, a logit of each query head in order, in any shape."""

    logits: relax.Expr
    heads: int


def without_sink(bindings: Bindings, softmax: Softmax) -> tuple[Softmax, Sink | None]:
    """The softmax as one of the scores alone, its weights after the slice that drops the sink's, and the sink if any.

    Raises NotAttention where one more column of scores is no sink of heads.
    """
    expr = softmax.scores
    while True:
        call = bindings.value(expr)
        if operator(call) == "astype" and keeps_precision(dtype_of(call), dtype_of(call.args[0])):
            expr = call.args[0]
        elif operator(call) == "subtract" and is_row_maximum(bindings, call.args[1], call.args[0]):
            expr = call.args[0]
        else:
            break
    if operator(call) != "concat" or not isinstance(parts := bindings.value(call.args[0]), relax.Tuple):
        return softmax, None
    if static_shape(call) is None or len(parts.fields) != 2:
        return softmax, None
    shapes = [shape_of(part) for part in parts.fields]
    if shapes[1][-1] != 1:
        return softmax, None
    scores, column = parts.fields
    if not comes_from_product(bindings, scores):
        return softmax, None
    if call.attrs.axis not in (-1, len(shapes[0]) - 1):
        raise NotAttention(f"its scores are concatenated along dimension {call.attrs.axis}")
    readers = bindings.readers[softmax.weights]
    sliced = [x for x in readers if softmax.summed is None or not x.same_as(softmax.summed)]
    if len(sliced) != 1 or not _drops_last(bindings.value(sliced[0])) or softmax.weights in bindings.outputs:
        raise NotAttention("the weights of its scores' last column, which are no product's, are not dropped")
    heads = shapes[0][1]
    logits = _of_heads(bindings, column, heads) if len(shapes[0]) == 4 else None
    if logits is None:
        raise NotAttention(f"a column of shape {shapes[1]} beside its scores is no sink: it is not one number a head")
    return replace(softmax, scores=scores, weights=sliced[0], empty_rows="zero"), Sink(logits, heads)


def _drops_last(call) -> bool:
    """Whether the call is x[..., :-1]."""
    if operator(call) != "strided_slice" or static_shape(call) is None:
        return False
    before, after = shape_of(call.args[0]), shape_of(call)
    starts = [int(n) for n in call.args[2]] if len(call.args) > 2 else []
    return after == (*before[:-1], before[-1] - 1) and bool(starts) and all(start == 0 for start in starts)


def _of_heads(bindings, expr, heads):
    """The `heads` numbers that `expr` (B, H, Sq, 1) spreads over batch and rows, or None if it does more."""
    while (call := bindings.call(expr, "broadcast_to", "astype")) is not None and dtype_of(call) in FLOATS:
        if operator(call) == "astype" and not keeps_precision(dtype_of(call), dtype_of(call.args[0])):
            break
        expr = call.args[0]
    shape = shape_of(expr)
    aligned = (1,) * (4 - len(shape)) + shape
    return expr if dtype_of(expr) in FLOATS and aligned in ((1, heads, 1, 1),) else None
