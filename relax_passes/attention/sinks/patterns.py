"""Sinks as one more column of the scores, which is dropped after the softmax.

    softmax(concat(scores, sink))[..., :-1] @ v        softmax(pad(scores))[..., :-1] @ v

The row's maximum may be subtracted first, and the column may be the first one.
"""

from dataclasses import replace

from tvm import relax

from relax_passes.attention.refusals.other_attention import leads_to_product
from relax_passes.attention.sinks.logits import taken_apart
from relax_passes.attention.spellings.row_maxima import is_row_maximum
from relax_passes.attention.spellings.softmax import Softmax
from relax_passes.attention.spellings.steps import NotAttention, comes_from_product
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.floats import keeps_precision


def without_column(bindings: Bindings, softmax: Softmax) -> Softmax:
    """The softmax with its scores and a sink apart, and with its weights after the slice that drops the sink's weight.

    `softmax` itself if its scores have no column beside them.  Raises NotAttention if the column is no sink.
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
    found = taken_apart(bindings, expr)
    if found is None:
        _check_other_columns(bindings, softmax, call)
        return softmax
    scores, sink, at_end = found
    if not comes_from_product(bindings, scores):
        return softmax
    if softmax.sink is not None:
        raise NotAttention("its scores have a sink beside them and another in the sum of their exponentials")
    weights, source_dtype = softmax.weights, dtype_of(call)
    readers = bindings.readers[weights]
    if len(readers) == 1 and operator(cast := bindings.value(readers[0])) == "astype":
        if keeps_precision(dtype_of(cast), source_dtype) and weights not in bindings.outputs:
            weights, readers = readers[0], bindings.readers[readers[0]]
    sliced = [x for x in readers if softmax.summed is None or not x.same_as(softmax.summed)]
    is_dropped = len(sliced) == 1 and weights not in bindings.outputs
    if not is_dropped or not _drops_column(bindings.value(sliced[0]), at_end):
        place = "last" if at_end else "first"
        raise NotAttention(f"the weights of its scores' {place} column, which are no product's, are not dropped")
    if sink is None:
        raise NotAttention("a column beside its scores is no sink: it is not one number a head")
    return replace(softmax, scores=scores, weights=sliced[0], empty_rows="zero", sink=sink)


def _check_other_columns(bindings, softmax, call):
    """NotAttention where scores are joined to something, or padded, in any other way, and their weights meet values."""
    if any(comes_from_product(bindings, part) for part in joined_scores(bindings, softmax, call)):
        raise NotAttention(f"{call.op.name} stands between q·kᵀ and the softmax")


def joined_scores(bindings: Bindings, softmax: Softmax, expr) -> list:
    """The tensors that `expr`, the scores, joins or pads, if their weights, or some columns of these, meet values."""
    call = bindings.value(expr)
    while operator(call) in ("astype", "subtract"):
        call = bindings.value(call.args[0])
    if operator(call) not in ("concat", "nn.pad"):
        return []
    columns, pending = [softmax.weights], [softmax.weights]
    while pending:
        for reader in bindings.readers[pending.pop()]:
            value = bindings.value(reader)
            if operator(value) in ("astype", "strided_slice", "split") or isinstance(value, relax.TupleGetItem):
                columns.append(reader)
                pending.append(reader)
    if not any(leads_to_product(bindings, x) for x in columns):
        return []
    return list(getattr(bindings.value(call.args[0]), "fields", [call.args[0]]))


def _drops_column(call, at_end) -> bool:
    """Whether the call is x[..., :-1], or x[..., 1:]."""
    if operator(call) != "strided_slice" or static_shape(call) is None:
        return False
    before, after = shape_of(call.args[0]), shape_of(call)
    if after != (*before[:-1], before[-1] - 1) or len(call.args) < 3:
        return False
    firsts = dict.fromkeys(range(len(before)), 0)
    firsts |= {int(axis) % len(before): int(start) for axis, start in zip(call.args[1], call.args[2])}
    *others, start = (firsts[axis] for axis in range(len(before)))
    return start == (0 if at_end else 1) and not any(others)
