"""Scores that are the weights of the values themselves: linear attention without a norm, (q kᵀ) v.

    (q kᵀ) v        (s · q kᵀ ⊙ decay) v        vᵀ (k qᵀ)        and what einsum makes of these

Two products in a row are this if

1. both operands of the first are computed from the function's inputs, and so is the other one of the second: a product
   by a constant is a projection, and so are two (x W₁ W₂, x U Vᵀ);
2. the second sums over the first one's columns, or its rows, through operators that keep both: factors, summands,
   decays, fills, transposes, reshapes of other dimensions, means over heads;
3. neither the rows nor the columns of the first, nor what the values are summed over, are features that a weight made
   (length_origins.py): q (kᵀ v), and (v kᵀ) q of states that are features by tokens, have no scores, and weights that
   are predicted from the inputs make features as others do;
4. keys and values are the same dimension of the inputs, where these are read as they are: (xᵀ x) y is a covariance;
5. where the second product has the first on its right, neither is the last dimension of an input: else q (kᵀ v) of the
   inputs themselves would be one.

The result of another attention is never scores.  The same rules find weights that a softmax or another function makes
of scores where spellings/softmax.py and other_attention.py, which look for q·kᵀ on the left, do not see them.
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
    """(the product of values with weights that are the scores `product`, what is to be said of it), None if none is.

    `through` goes on through nonlinear operators, of which the first is named.
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
    """Where the lengths at `places` are after an operator; those that are not kept as they are are left out."""
    name, before = operator(call), shape_of(var)
    if not name or static_shape(call) is None:
        return {}
    after = shape_of(call)
    moves = {place: place + len(after) - len(before) for place in places}
    if name == "permute_dims":
        moves = {place: permutation(call).index(place) for place in places}
    elif name == "matmul":  # of heads with each other, by a weight
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
