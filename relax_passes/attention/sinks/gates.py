"""Sinks applied afterwards: weights, or their product with v, are multiplied by the share that the sink leaves.

    softmax(s) * sigmoid(logsumexp(s) - sink) @ v        (softmax(s) @ v) * sigmoid(logsumexp(s) - sink)

sigmoid(l - sink) is exp(l) / (exp(l) + exp(sink)).  A gate sigmoid(logsumexp(s)) has the sink 0.
"""

from tvm import relax

from relax_passes.attention.refusals.other_attention import products_before
from relax_passes.attention.sinks.log_sum_exp import find_log_sum_exp
from relax_passes.attention.sinks.logits import Sink, logits_of
from relax_passes.attention.spellings.steps import NotAttention
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.floats import keeps_precision
from relax_passes.ir.same_values import as_precise, narrowest


def find_gate(bindings: Bindings, var: relax.Var, scores) -> tuple[relax.Var, Sink] | None:
    """(the variable of `var` times a sink's gate, the sink) if nothing else reads `var`; None if there is no such gate.

    Raises NotAttention if the other operand of the product, quotient or sum that reads `var` comes from the same scores
    and is no such gate: a mask given for the attention would not reach that operand.
    """
    readers = bindings.readers[var]
    source_dtype = dtype_of(narrowest(bindings, scores))
    if len(readers) == 1 and var not in bindings.outputs and operator(cast := bindings.value(readers[0])) == "astype":
        if keeps_precision(dtype_of(cast), source_dtype):
            return find_gate(bindings, readers[0], scores)
    if var in bindings.outputs or len(readers) != 1:
        return None
    call = bindings.value(readers[0])
    if operator(call) not in ("multiply", "divide", "add", "subtract"):
        return None
    is_first = call.args[0].same_as(var)
    other = call.args[1] if is_first else call.args[0]
    if other.same_as(var) or not isinstance(other, relax.Var):
        return None
    sink = _sink_of(bindings, other, scores) if operator(call) == "multiply" else None
    if sink is not None and static_shape(call) == static_shape(var):
        return readers[0], sink
    if products_before(bindings, bindings.value(other)) & products_before(bindings, bindings.value(scores)):
        raise NotAttention("its result meets something else that its scores give")
    return None


def _sink_of(bindings, gate, scores) -> Sink | None:
    while (call := bindings.call(gate, "broadcast_to")) is not None:
        gate = call.args[0]
    lead = shape_of(scores)[:-1]
    dtype = dtype_of(narrowest(bindings, scores))
    call = bindings.call(as_precise(bindings, gate, dtype), "sigmoid")
    if call is None or static_shape(gate) != (*lead, 1):
        return None
    exponent = as_precise(bindings, call.args[0], dtype)
    if _is_log_sum_exp(bindings, exponent, scores):
        return Sink(0.0)
    difference = bindings.call(exponent, "subtract")
    if difference is None or not _is_log_sum_exp(bindings, difference.args[0], scores):
        return None
    return logits_of(bindings, difference.args[1], lead[:-1], len(lead) + 1 - len(shape_of(difference)))


def _is_log_sum_exp(bindings, expr, scores) -> bool:
    found = find_log_sum_exp(bindings, expr, scores)
    return found is not None and found.sink is None
