"""Recovery of keys and values before their heads were repeated for grouped-query attention."""

import math
from dataclasses import dataclass

from tvm import relax

from relax_passes.ir.bindings import Bindings, operator, permutation, shape_of, static_shape, strip_reshapes


@dataclass(frozen=True)
class KeysOrValues:
    """Keys or values before repetition: `heads` heads, each of which the model repeats `group` times.

    `source` holds the elements of (B, heads, S, D), or of (B, S, heads, D) if `swapped`, in any shape.
    """

    source: relax.Expr
    swapped: bool
    heads: int
    group: int


def unrepeated(bindings: Bindings, expr, batch: int, length: int, dim: int) -> KeysOrValues:
    """The keys or values that were repeated to `expr`, which holds the elements of (B, H, S, D).

    `expr` itself with group 1 if it was not repeated.  Recognises `repeat_interleave`, expand and reshape
    (transformers' `repeat_kv`) and the broadcast of a single head, along the heads of (B, H, S, D) or of (B, S, H, D)
    before a transpose.
    """
    expr = strip_reshapes(bindings, expr)
    swap = bindings.call(expr, "permute_dims")
    swapped, inner = False, expr
    if swap is not None and permutation(swap) == [0, 2, 1, 3]:
        swapped, inner = True, strip_reshapes(bindings, swap.args[0], inner_dims=1)
    heads = math.prod(shape_of(expr)) // (batch * length * dim)
    source, group = _repetition(bindings, inner, from_end=2 if swapped else 3)
    if group == 1 or heads % group:
        return KeysOrValues(expr, False, heads, 1)
    return KeysOrValues(source, swapped, heads // group, group)


def emit_keys_and_values(emit, visit, k: KeysOrValues, v: KeysOrValues, plain_k, plain_v, batch, length, dims):
    """Emit keys (B, heads, S, D) and values (B, heads, S, Dv) with the same number of heads.

    Heads are left unrepeated if keys and values were repeated alike.  `visit` maps an expression of the old function to
    the new one.  `plain_k` and `plain_v` are the model's own keys and values, with repeated heads.
    """
    if (k.heads, k.group) != (v.heads, v.group):
        k, v = (KeysOrValues(plain, False, x.heads * x.group, 1) for plain, x in ((plain_k, k), (plain_v, v)))
    heads = max(k.heads, v.heads)
    results = []
    for x, dim in zip((k, v), dims):
        shape = (batch, length, x.heads, dim) if x.swapped else (batch, x.heads, length, dim)
        result = reshaped(emit, visit(x.source), shape)
        if x.swapped:
            result = emit(relax.op.permute_dims(result, [0, 2, 1, 3]))
        if x.heads < heads:
            result = emit(relax.op.repeat(result, heads // x.heads, axis=1))
        results.append(result)
    return results


def reshaped(emit, expr, shape) -> relax.Expr:
    """`expr` in this shape; emits nothing if `expr` has it already."""
    return expr if static_shape(expr) == tuple(shape) else emit(relax.op.reshape(expr, shape))


def _repetition(bindings, expr, from_end):
    """(source, times) of a repetition along dimension `rank - from_end`; (`expr`, 1) if there is none."""
    call = bindings.call(expr, "repeat", "broadcast_to")
    if call is None or static_shape(call) is None or static_shape(call.args[0]) is None:
        return expr, 1
    before, after = shape_of(call.args[0]), shape_of(call)
    axis = len(after) - from_end
    if operator(call) == "repeat":
        wanted = call.attrs.axis is not None and int(call.attrs.axis) % len(after) == axis
        return (call.args[0], int(call.attrs.repeats)) if wanted else (expr, 1)
    grown = [i for i, (n, m) in enumerate(zip(before, after)) if n != m]
    return (call.args[0], after[axis]) if len(before) == len(after) and grown == [axis] else (expr, 1)
