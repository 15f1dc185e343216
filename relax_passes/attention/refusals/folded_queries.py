"""Queries whose rows are several dimensions of the model, folded: a given mask would count them as one sequence.

    scaled_dot_product_attention(q.reshape(B, 1, H·Sq, D), k (B, 1, Skv, D), v)         heads that share their keys

Where a weight made a part of the rows, that part are heads.  Where nothing tells what made them, as many of one part as
there are keys are taken for the sequence.  Rows that are as many as the keys are the sequence themselves, such as those
of an image, height and width.
"""

from tvm import relax

from relax_passes.attention.layouts.axes import Axis, layout_of, size, undivided
from relax_passes.attention.layouts.folded_rows import BY_ELEMENT, is_view, viewed
from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.length_origins import FEATURES, LengthOrigins

FOLDED_QUERIES = (
    "its {rows} rows of queries are dimensions of {parts}, folded, and a mask counts sequences of {kv_len} keys: give "
    "heads a dimension of their own, (B, H, S, D), with keys that are expanded or enable_gqa=True"
)


def folded_queries(bindings: Bindings, q: relax.Expr, kv_len: int, origins: LengthOrigins) -> str | None:
    """The reason why a mask that is given does not fit queries (B, H, Sq, D) of `kv_len` keys, or None."""
    if shape_of(q)[2] == kv_len:
        return None
    root, way = q, []
    while (source := _source(bindings, root)) is not None:
        way.append(bindings.value(root))
        root = source
    dimensions = layout_of(shape_of(root))
    layout = dimensions
    for call in reversed(way):
        if is_view(call):
            moved = viewed(call, layout)
            if moved is None:
                return None
            layout = moved
    rows = undivided(layout[2])
    if len(rows) < 2:
        return None
    made = {axis: origins.of(root, place) for place, of in enumerate(dimensions) for axis in undivided(of)}
    by_weights = [axis for axis in rows if made[axis] == FEATURES]
    if 0 < len(by_weights) < len(rows) or _has_sequence(rows, kv_len):
        parts = "×".join(str(axis.size) for axis in rows)
        return FOLDED_QUERIES.format(rows=shape_of(q)[2], parts=parts, kv_len=kv_len)
    return None


def _source(bindings: Bindings, expr: relax.Expr) -> relax.Expr | None:
    """What an expression has the elements of, moved or each computed from one; None if several such are joined."""
    call = bindings.value(expr)
    if is_view(call):
        return call.args[0]
    if operator(call) not in BY_ELEMENT:
        return None
    whole = [x for x in call.args if static_shape(x) == static_shape(call) is not None and not bindings.is_weight(x)]
    return whole[0] if len(whole) == 1 else None


def _has_sequence(rows: list[Axis], kv_len: int) -> bool:
    """Whether the first or the last of some axes have as many elements as there are keys."""
    return any(kv_len in (size(rows[:n]), size(rows[n:])) for n in range(1, len(rows)))
