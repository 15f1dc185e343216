"""Attention without a softmax: scores that a sigmoid, a relu or the like turns into weights of the values.

A mask drops scores before a softmax, and the other weights grow in their place.  The meaning of a mask without a
softmax is not for a compiler to guess.  So these attentions are reported, and refused if a mask was given for them.
"""

import math
from collections import Counter
from itertools import zip_longest

from tvm import relax

from relax_passes.attention.spellings.steps import is_product_of_states
from relax_passes.ir.bindings import Bindings, element_count, operator, shape_of, static_shape

OTHER_WEIGHTS = "{} turns q·kᵀ into the weights of the values, which is no softmax"
NONLINEAR = (
    *("nn.relu", "nn.relu6", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.silu", "nn.softplus", "nn.selu", "nn.elu"),
    *("nn.softmax", "nn.log_softmax", "sigmoid", "tanh", "exp", "erf", "abs", "square", "power", "clip", "maximum"),
)

REPETITIONS = ("broadcast_to", "tile", "repeat")


def products_before(bindings: Bindings, expr) -> set[relax.Var]:
    """The variables of the matrix products that `expr` is computed from, without other products in between."""
    products, pending, seen = set(), list(relax.analysis.free_vars(expr)), set()
    while pending:
        var = pending.pop()
        if var in seen or var not in bindings.values:
            continue
        seen.add(var)
        if operator(bindings.values[var]) == "matmul":
            products.add(var)
        else:
            pending.extend(bindings.reads[var])
    return products


def behind_products(bindings: Bindings, products: set[relax.Var]) -> set[relax.Var]:
    """The variables that have one of these matrix products among their `products_before`."""
    found: set[relax.Var] = set()
    passed_on = set(products)  # a matrix product is not passed by, any other value that is found is
    for var, value in bindings.values.items():
        if not passed_on.isdisjoint(bindings.reads[var]):
            found.add(var)
            if operator(value) != "matmul":
                passed_on.add(var)
    return found


def leads_to_product(bindings: Bindings, var: relax.Var) -> bool:
    """Whether a matmul reads the weights from the left, through operators that keep their number of elements."""
    pending, seen = [var], set()
    while pending:
        var = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            if operator(call) == "matmul" and call.args[0].same_as(var):
                return True
            if reader not in seen and operator(call) and element_count(call) == element_count(var):
                seen.add(reader)
                pending.append(reader)
    return False


def compares_pairs(bindings: Bindings, scores, is_closed) -> bool:
    """Whether scores (…, Sq, Skv) compare each of Sq rows with each of Skv others, both known at run time only.

    Distances do, and so do sums q[:, :, None] + k[:, None] followed by a tanh and a projection to one number.  So do
    operands that are first repeated, one for each row and one for each column, and then added, multiplied or joined.
    """
    shape = static_shape(scores)
    if shape is None or len(shape) < 2:
        return False
    pending, seen = [scores], set()
    while pending:
        call = bindings.value(pending.pop())
        if not operator(call) or not _has_pairs(static_shape(call) or (), *shape[-2:]):
            continue  # a value that does not have the scores' rows and columns
        arguments = [x for x in bindings.operands(call) if isinstance(x, relax.Var) and not is_closed(x)]
        shapes = [known for x in arguments if (known := static_shape(x)) is not None]
        if len(shapes) == 2 and _is_outer(*shapes):
            return True
        if len(arguments) > 1 and _are_crossed(_repetitions(bindings, arguments, is_closed), shape):
            return True
        pending += [x for x in arguments if x not in seen]
        seen.update(arguments)
    return False


def _has_pairs(shape, rows: int, columns: int) -> bool:
    """Whether a shape has both lengths, or one dimension that counts all pairs."""
    if not Counter((rows, columns)) - Counter(shape):
        return True
    return min(rows, columns) > 1 and any(n and n % (rows * columns) == 0 for n in shape)


def _are_crossed(repetitions, shape) -> bool:
    """Whether one operand is repeated for each row, and another one for each column."""
    times = {repetition: _times(*repetition[1:]) for repetition in repetitions}
    rows, columns = ({x for x in times if n > 1 and n in times[x]} for n in shape[-2:])
    return bool(rows and columns) and len(rows | columns) > 1


def _times(before, after) -> set[int]:
    """How often each dimension was repeated."""
    return {m // n for n, m in zip_longest(reversed(before), reversed(after), fillvalue=1)}


def _repetitions(bindings, expressions, is_closed) -> set[tuple]:
    """The repetitions from which `expressions` are computed, each as (operator, shape before, shape after).

    The search does not go beyond reductions, or beyond products of two operands known at run time only.
    """
    found, pending, seen = set(), list(expressions), set()
    while pending:
        expr = pending.pop()
        call = bindings.value(expr)
        before = [x for x in bindings.operands(call) if not is_closed(x)] if operator(call) else []
        if static_shape(call) is None or operator(call) in ("matmul", "einsum") and len(before) > 1:
            continue
        elements = math.prod(shape_of(call))
        before = [x for x in before if static_shape(x) is not None and math.prod(shape_of(x)) <= elements]
        if operator(call) in REPETITIONS and before and math.prod(shape_of(before[0])) < elements:
            found.add((operator(call), shape_of(before[0]), shape_of(call)))
            continue
        pending += [x for x in before if x not in seen]
        seen.update(before)
    return found


def _is_outer(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether each of two shapes is broadcast along a dimension of the other."""
    pairs = list(zip_longest(reversed(a), reversed(b), fillvalue=1))
    return any(x == 1 < y for x, y in pairs) and any(y == 1 < x for x, y in pairs)


def other_weights(bindings: Bindings, product: relax.Var) -> str | None:
    """The nonlinear operator that turns a product of states into the weights of another product, or None.

    It and the operators around it work element by element.
    """
    call = bindings.value(product)
    if not is_product_of_states(bindings, call) or any(_is_weight(bindings, x) for x in call.args):
        return None
    pending, seen = [(product, None)], set()
    while pending:
        var, nonlinear = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            name = operator(call)
            if name == "matmul" and call.args[0].same_as(var):
                if nonlinear is not None and not _is_weight(bindings, call.args[1]):
                    return nonlinear
            elif name and name != "matmul" and element_count(call) == element_count(var):
                step = reader, nonlinear or (call.op.name if is_nonlinear(bindings, call, product) else None)
                if step not in seen:
                    seen.add(step)
                    pending.append(step)
    return None


def is_nonlinear(bindings: Bindings, call, product: relax.Var) -> bool:
    """Whether an operator on scores is nonlinear, or divides them by something computed from them, as by a norm."""
    if operator(call) == "divide":
        return bindings.depends_on(call.args[1], bindings.value(product))
    return operator(call) in NONLINEAR


def _is_weight(bindings, expr) -> bool:
    """Whether `expr` is a constant, a view of one, or some of its rows."""
    while (call := bindings.call(expr, "permute_dims", "reshape", "astype", "take", "expand_dims")) is not None:
        expr = call.args[0]
    return bindings.is_weight(expr)
