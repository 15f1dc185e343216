"""Segments that apply rotary position embedding to queries and keys, in LLaMA's form: it rotates the halves of a head.

    add(multiply(x, cos), multiply(concat(negative(second half of x), first half of x), sin))        for q and for k

q and k are views of one projection, or tensors of their own, (batch, tokens, heads, head size) in memory.
"""

import math
from typing import NamedTuple

from tvm import relax

from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.ir.bindings import dtype_of, shape_of, static_shape
from relax_passes.ir.strided_views import find_view, slice_bounds
from tir_kernels.attention.problem import View
from tir_kernels.errors import StofError
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.fusion.steps import VECTOR

OPERATORS_PER_ROTATION = 5


class Rotation(NamedTuple):
    """x (batch, heads, tokens, head size) turned by cos and sin; the base tensor of x, and x as a view of it."""

    result: relax.Var
    cos: relax.Expr
    sin: relax.Expr
    base: relax.Expr
    view: View


def match_rotary(graph: OperatorGraph) -> SegmentMatch:
    """The rotation of a query and its key.  Raises NoProblem with the reason if there is none."""
    results = [var for i, var in enumerate(graph.variables) if i in graph.results]
    if len(graph.operators) != 2 * OPERATORS_PER_ROTATION or len(results) != 2:
        raise NoProblem(f"{len(graph.operators)} operators are not the rotation of one query and one key")
    q, k = (_rotation(graph, var) for var in results)
    if not (q.cos.same_as(k.cos) and q.sin.same_as(k.sin)):
        raise NoProblem("query and key are turned by different angles")
    batch, heads, length, dim = shape_of(q.result)
    kv_batch, kv_heads, kv_length, kv_dim = shape_of(k.result)
    if (kv_batch, kv_length, kv_dim) != (batch, length, dim):
        raise NoProblem(f"a query {static_shape(q.result)} beside a key {static_shape(k.result)}")
    packed_heads = _packed_heads(q, k, batch, heads, length, dim)
    sources = (q.base,) if packed_heads else (q.base, k.base)
    tables = q.cos, q.sin
    table_batch = _table_batch(tables, length, dim)
    dtypes = {dtype_of(x) for x in (*sources, q.result, k.result)}
    table_dtypes = {dtype_of(x) for x in tables}
    if len(dtypes) != 1 or len(table_dtypes) != 1:
        raise NoProblem(f"it mixes {' and '.join(sorted(dtypes | table_dtypes))}")
    (dtype,), (table_dtype,) = dtypes, table_dtypes
    try:
        problem = RotaryProblem(
            batch, length, heads, kv_heads, dim, dtype, packed_heads, table_batch, table_dtype, "bhsd"
        )
    except StofError as error:
        raise NoProblem(str(error)) from None
    return SegmentMatch(problem, (*sources, *tables), (q.result, k.result))


def _rotation(graph: OperatorGraph, result) -> Rotation:
    bindings = graph.bindings
    if len(shape_of(result)) != 4:
        raise NoProblem(f"a rotation of {static_shape(result)}")
    total = bindings.call(result, "add")
    summands = () if total is None else total.args
    products = [product for x in summands if (product := bindings.call(x, "multiply")) is not None]
    if len(products) != 2:
        raise NoProblem("no sum of two products")
    for straight, crossed in (products, products[::-1]):
        for turned, sin in (crossed.args, crossed.args[::-1]):
            x = _turned_from(bindings, turned)
            others = [a for a in straight.args if x is not None and not _same_view(bindings, a, x)]
            if len(others) == 1:
                cos_table, sin_table = (_table(graph, t, shape_of(result)) for t in (others[0], sin))
                found = find_view(bindings, x, VECTOR)
                if found is None:
                    raise NoProblem("what is turned is no view of a projection")
                return Rotation(result, cos_table, sin_table, _outside(graph, found[0]), found[1])
    raise NoProblem("no tensor is turned against its own halves")


def _turned_from(bindings, expr):
    """x where `expr` is concat(-x[second half], x[first half]) along the last dimension, else None."""
    concat = bindings.call(expr, "concat")
    if concat is None or len(concat.args[0].fields) != 2:
        return None
    first, second = concat.args[0].fields
    negative = bindings.call(first, "negative")
    low, high = bindings.call(second, "strided_slice"), None
    if negative is not None:
        high = bindings.call(negative.args[0], "strided_slice")
    if low is None or high is None or not _same_view(bindings, low.args[0], high.args[0]):
        return None
    rank, dim = len(shape_of(expr)), shape_of(expr)[-1]
    halves = [{rank - 1: (0, dim // 2, 1)}, {rank - 1: (dim // 2, dim, 1)}]
    axis = int(concat.attrs.axis) % rank
    return low.args[0] if axis == rank - 1 and [slice_bounds(low), slice_bounds(high)] == halves else None


def _same_view(bindings, a, b) -> bool:
    """Whether two expressions are one tensor."""
    return bindings.value(a).same_as(bindings.value(b))


def _table(graph, expr, shape):
    """Cosines or sines before reshapes; NoProblem unless they vary by token, or by sequence and token, only."""
    batch, _, length, dim = shape
    if static_shape(expr) not in ((1, 1, length, dim), (batch, 1, length, dim)):
        raise NoProblem(f"cosines of {static_shape(expr)} for {shape}")
    while (inner := graph.bindings.same_elements(expr)) is not None:
        expr = inner
    return _outside(graph, expr)


def _outside(graph, expr):
    if any(root in graph.index for v in relax.analysis.free_vars(expr) for root in graph.roots(v)):
        raise NoProblem("an operand is computed in the segment, beside the rotation")
    return expr


def _packed_heads(q: Rotation, k: Rotation, batch, heads, length, dim) -> int | None:
    """The heads of a token in the projection that holds queries, then keys; None if each is a tensor of its own."""
    is_packed = q.base.same_as(k.base)
    offsets = (0, heads * dim) if is_packed else (0, 0)
    tokens = [_token_stride(rotation.view, batch, length) for rotation in (q, k)]
    for rotation, offset, token in zip((q, k), offsets, tokens):
        view, count = rotation.view, shape_of(rotation.result)[1]
        expected = View(batch * length * token, offset, length * token * (batch > 1), dim * (count > 1), view.token)
        if view != expected or token % dim or (not is_packed and token != count * dim):
            raise NoProblem(f"what is turned is a {view}, neither a tensor of its own nor packed after queries")
    return tokens[0] // dim if is_packed else None


def _token_stride(view: View, batch, length) -> int:
    """The stride from one token to the next.

    With one token it is the stride from one sequence to the next, and with one sequence, too, the number of elements.
    """
    return view.token if length > 1 else view.batch if batch > 1 else view.size


def _table_batch(tables, length, dim) -> int:
    """1 or batch: how many sequences have cosines and sines of their own."""
    counts = {math.prod(shape_of(t)) // (length * dim) for t in tables}
    if len(counts) != 1:
        raise NoProblem(f"cosines of {' and '.join(str(static_shape(t)) for t in tables)}")
    (count,) = counts
    return count
