"""Where a call writes the keys of an attention into a cache: the positions of its tokens in the sequence.

The keys of an attention are a cache if they are a whole state, seen through views, casts and repeated heads, after one
scatter along its length:

    keys = view(scatter(view(state), positions, new))
"""

import math
from typing import NamedTuple

from tvm import relax

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, shape_of, static_shape
from relax_passes.ir.same_values import bare
from tir_kernels.scatter import ScatterArguments, scatter_arguments

LENGTH = 2  # the axis of keys (B, H, S, D)


class WrittenKeys(NamedTuple):
    """Keys, or values, that a call wrote into a state of `length` positions.

    `index` holds `tokens` positions, for all batch entries and heads the same; `wraps` says whether a negative one
    counts from the end.
    """

    index: relax.Expr
    tokens: int
    length: int
    wraps: bool


def written_keys(mod, bindings: Bindings, keys: relax.Expr, states: list[relax.Var]) -> WrittenKeys | str:
    """The write that made `keys`, of shape (B, H, S, D); why they are no whole cache, where there is none."""
    found = _before_views(bindings, keys, LENGTH)
    if found is None:
        return "its keys and values are not a whole cache in the order of its positions"
    written, axis = found
    scatter = _scatter(mod, bindings, written)
    if scatter is None:
        if any(written.same_as(state) for state in states):
            return "the call writes no new keys into the cache before"
        return f"{operator(written) or 'an input'} stands between the cache and the attention"
    (source, index, _), how = scatter
    outer, length, _ = how.shape
    if axis != 1 or shape_of(keys)[LENGTH] != length:
        return "new keys are written along another dimension than the length"
    if how.reduction != "set":
        return f"new keys are combined with old ones ({how.reduction})"
    if math.prod(how.index_shape) != how.updates:
        return "batch entries or heads have positions of their own"
    before = _before_views(bindings, source, 1)
    if before is None or not any(before[0].same_as(state) for state in states):
        again = before is not None and _scatter(mod, bindings, before[0]) is not None
        return "the cache is written more than once" if again else "what is written is not the whole cache"
    return WrittenKeys(bare(bindings, index), how.updates, length, how.wraps)


def _scatter(mod, bindings: Bindings, expr) -> tuple[list, ScatterArguments] | None:
    """The operands and the arguments of the scatter that `expr` is the result of."""
    call = bindings.call(expr, "call_tir")
    if call is None or (how := scatter_arguments(mod[call.args[0]])) is None:
        return None
    return list(bindings.value(call.args[1]).fields), how


def _before_views(bindings: Bindings, expr, axis: int) -> tuple[relax.Expr, int] | None:
    """What `expr` is a view of, casts and repetitions along other axes included, and which axis its `axis` is there.

    None where the axis is not a whole one there.
    """
    while isinstance(value := bindings.value(expr), relax.Call):
        name = operator(value)
        if name not in VIEWS or static_shape(value) is None or static_shape(value.args[0]) is None:
            break
        found = VIEWS[name](value, axis)
        if found is None:
            return None
        expr, axis = value.args[0], found
    return value, axis


def _same_place(call, axis: int) -> int | None:
    """The axis before a reshape: as long, with as many elements before it."""
    before, after = shape_of(call.args[0]), shape_of(call)
    wanted = after[axis], math.prod(after[:axis])
    return next((i for i, n in enumerate(before) if (n, math.prod(before[:i])) == wanted), None)


def _permuted(call, axis: int) -> int:
    return permutation(call)[axis]


def _broadcast(call, axis: int) -> int | None:
    before, after = shape_of(call.args[0]), shape_of(call)
    axis_before = axis - (len(after) - len(before))
    return axis_before if axis_before >= 0 and before[axis_before] == after[axis] else None


def _repeated(call, axis: int) -> int | None:
    along = call.attrs.axis
    return None if along is None or int(along) % len(shape_of(call)) == axis else axis


VIEWS = {
    **dict.fromkeys(SAME_ELEMENTS, _same_place),
    "permute_dims": _permuted,
    "broadcast_to": _broadcast,
    "repeat": _repeated,
    "astype": lambda call, axis: axis,
}
