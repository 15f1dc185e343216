"""Queries whose rows are several dimensions of the model, folded: a given mask would count them as one sequence.

    scaled_dot_product_attention(q.reshape(B, 1, H·Sq, D), k (B, 1, Skv, D), v)         heads that share their keys

Where a weight made a part of the rows of q, and none of those of k, that part are heads, also where there is one query
for each.  Where nothing tells what made them, as many of one part as there are keys are taken for the sequence.  Rows
that are as many as the keys are the sequence themselves, such as those of an image, height and width, and so are tokens
that a weight made several of, of q and k alike.
"""

from tvm import relax

from relax_passes.attention.layouts.axes import Axis, Layout, layout_of, size, undivided
from relax_passes.attention.layouts.folded_rows import BY_ELEMENT, is_view, viewed
from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.length_origins import FEATURES, LengthOrigins

FOLDED_QUERIES = (
    "its {rows} rows of queries are dimensions of {parts}, folded, and a mask counts sequences of {kv_len} keys: give "
    "heads a dimension of their own, (B, H, S, D), with keys that are expanded or enable_gqa=True"
)


def folded_queries(bindings: Bindings, q: relax.Expr, k: relax.Expr, origins: LengthOrigins) -> str | None:
    """The reason why a mask that is given does not fit q (B, H, Sq, D) and k (B, H, Skv, D), or None."""
    q_len, kv_len = shape_of(q)[2], shape_of(k)[2]
    rows, heads = _rows(bindings, q, origins)
    has_heads = bool(heads) and not _rows(bindings, k, origins)[1]
    if has_heads or (q_len != kv_len and _has_sequence(rows, kv_len)):
        parts = "×".join(str(axis.size) for axis in rows)
        return FOLDED_QUERIES.format(rows=q_len, parts=parts, kv_len=kv_len)
    return None


def _rows(bindings: Bindings, x: relax.Expr, origins: LengthOrigins) -> tuple[list[Axis], list[Axis]]:
    """The dimensions that the rows of x (B, H, S, D) are made of, and those among them that a weight made."""
    root, way = x, []
    while (source := _source(bindings, root)) is not None:
        way.append(bindings.value(root))
        root = source
    dimensions = layout_of(shape_of(root))
    layout: Layout | None = dimensions
    for call in reversed(way):
        if is_view(call) and layout is not None:
            layout = viewed(call, layout)
    if layout is None:
        return [], []
    made = {axis: origins.of(root, place) for place, of in enumerate(dimensions) for axis in undivided(of)}
    rows = undivided(layout[2])
    return rows, [axis for axis in rows if made[axis] == FEATURES]


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
