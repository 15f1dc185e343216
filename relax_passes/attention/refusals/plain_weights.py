"""Scores that weigh the values directly: linear attention without a norm, (q kᵀ) v.

    (q kᵀ) v        (s · q kᵀ ⊙ decay) v        vᵀ (k qᵀ)        and what einsum makes of these

Two products in a row are such an attention if

1. both operands of the first product, and the other operand of the second, are computed from the function's inputs: a
   product by a constant is a projection, and so are two of them (x W₁ W₂, x U Vᵀ);
2. the second product sums over the columns, or the rows, of the first; the operators between the two keep both
   dimensions: factors, summands, decays, fills, transposes, reshapes of other dimensions, means over heads;
3. the rows and columns of the first product, and the dimension that the second sums over, are not features that a
   weight made (length_origins.py): q (kᵀ v) has no scores, and neither has (v kᵀ) q of states that are features by
   tokens; weights that are predicted from the inputs make features, too;
4. keys and values run along the same dimension of the inputs, if they are inputs themselves: (xᵀ x) y is a covariance;
5. if the first product is the right operand of the second, neither its rows nor its columns are the last dimension of
   an input: otherwise q (kᵀ v) of the inputs themselves would match.

The result of another attention is never taken for scores.  The same rules find weights that a softmax or another
function makes of scores and that spellings/softmax.py and other_attention.py miss, because these look for q·kᵀ on the
left.
"""

from tvm import relax

from relax_passes.attention.refusals.other_attention import OTHER_WEIGHTS, is_nonlinear
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, shape_of, static_shape
from relax_passes.ir.length_origins import FEATURES, LAST, REDUCTIONS, LengthOrigins, merged_and_split, reduced

PLAIN_WEIGHTS = "q·kᵀ itself is the weights of the values, without a softmax"
UNKNOWN_WEIGHTS = (
    "{} makes weights of q·kᵀ that meet the values transposed, and its scores cannot be turned to meet them"
)
SOFTMAXES = ("relax.nn.softmax", "relax.nn.log_softmax", "relax.exp")


def plain_weights(
    bindings: Bindings, product: relax.Var, origins: LengthOrigins, through: bool
) -> tuple[relax.Var, str] | None:
    """(the product that weighs values by the scores `product`, the reason to report), or None.

    With `through`, nonlinear operators may lie between the two products; the reason names the first one.
    """
    call = bindings.value(product)
    if static_shape(call) is None or not all(_is_matrix(x) and not origins.is_closed(x) for x in call.args):
        return None
    shape, lengths = shape_of(call), {axis: origins.of(product, axis) for axis in (-2, -1)}
    if FEATURES in lengths.values():
        return None
    start = {len(shape) + axis: axis for axis in lengths}  # where each length is now
    pending, seen = [(product, None, start)], set()
    while pending:
        var, nonlinear, places = pending.pop()
        for reader in dict.fromkeys(bindings.readers[var]):
            call = bindings.value(reader)
            if operator(call) == "matmul" and _weights_values(call, var, places, lengths, origins):
                return reader, _what(nonlinear)
            name = nonlinear
            if is_nonlinear(bindings, call, product):
                if not through:
                    continue
                name = name or call.op.name
            if (reader, name) not in seen and (kept := _places_after(call, var, places, origins)):
                seen.add((reader, name))
                pending.append((reader, name, kept))
    return None


def _what(nonlinear: str | None) -> str:
    if nonlinear is None:
        return PLAIN_WEIGHTS
    return (UNKNOWN_WEIGHTS if nonlinear in SOFTMAXES else OTHER_WEIGHTS).format(nonlinear)


def _weights_values(call, var, places, lengths, origins) -> bool:
    """Whether the product `call` sums over one of the two lengths of `var`, and over tokens of the values."""
    is_left = call.args[0].same_as(var)
    values, axis, opposite = (call.args[1], -1, -2) if is_left else (call.args[0], -2, -1)
    place = len(shape_of(var)) + axis
    if values.same_as(var) or place not in places or not _is_matrix(values) or origins.is_closed(values):
        return False
    if lengths[places[place]] != origins.of(values, opposite):
        return False
    return is_left or LAST not in lengths.values()


def _is_matrix(expr) -> bool:
    return static_shape(expr) is not None and len(shape_of(expr)) > 1


def _places_after(call, var, places, origins) -> dict[int, int]:
    """Where the lengths at `places` are after an operator, without those that the operator does not keep."""
    name, before = operator(call), shape_of(var)
    if not name or static_shape(call) is None:
        return {}
    after = shape_of(call)
    moves = {place: place + len(after) - len(before) for place in places}
    if name == "permute_dims":
        moves = {place: permutation(call).index(place) for place in places}
    elif name == "matmul":  # a weight mixes heads with each other
        is_mixed = call.args[0].same_as(var) and origins.is_closed(call.args[1]) and len(after) == len(before)
        moves = {place: place for place in places} if is_mixed and len(before) - 1 not in places else {}
    elif name in REDUCTIONS and not bool(call.attrs.keepdims):
        gone = reduced(call)
        moves = {} if {*gone} & {*places} else {place: place - sum(i < place for i in gone) for place in places}
    elif name in SAME_ELEMENTS and after[-2:] != before[-2:]:
        moves = {old[0]: new[0] for old, new in merged_and_split(before, after) if len(old) == len(new) == 1}
    return {
        new: places[old]
        for old, new in moves.items()
        if old in places and 0 <= new < len(after) and after[new] == before[old]
    }
