"""UnfoldHeads: heads that share keys, folded into the rows of a product, become a dimension of their own.

    reshape(matmul(q (B, H·Sq, D), kᵀ (B, D, Skv)), (B, H, Sq, Skv))        multi-query attention by einsum or bmm
    matmul(reshape(p (B, H, Sq, Skv), (B, H·Sq, Skv)), v (B, Skv, Dv))

become matmul(q (B, H, Sq, D), kᵀ (B, 1, D, Skv)) and matmul(p, v (B, 1, Skv, Dv)).  So do products of groups of heads,
with the dimensions in any order: transposes of scores and of weights become transposes of operands and of results.  Of
one query, as in decoding, all rows are heads; they are taken for these only where a weight made them.  A product is
rewritten only if a softmax, or an exponential, reads it or gives its operand.  Whatever it means, the
numbers stay the same.

Preconditions: "main" is one dataflow block with constants bound.
"""

from dataclasses import dataclass

import tvm
from tvm import relax

from relax_passes.attention.layouts.axes import Axis, Layout, flat, layout_of, size, undivided
from relax_passes.attention.layouts.folded_rows import (
    FoldedValue,
    folded_rows,
    is_view,
    traced_layout,
    unfolded_values,
    viewed,
)
from relax_passes.attention.spellings.patterns import Known
from relax_passes.ir.bindings import (
    Bindings,
    dtype_of,
    element_count,
    operator,
    shape_of,
    static_shape,
)
from relax_passes.ir.length_origins import FEATURES, OTHER
from relax_passes.ir.rebuild import rebuild

SOFTMAXES = ("nn.softmax", "nn.log_softmax", "exp")

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="UnfoldHeads")
class UnfoldHeads:
    """Give the heads of "main" that are folded into rows of scores or weights a dimension of their own."""

    def transform_module(self, mod, _ctx):
        for _ in range(2):  # weights of folded rows are unfolded before the product that reads them
            mod = self._unfolded(mod)
        return mod

    def _unfolded(self, mod):
        bindings = Bindings(mod["main"])
        origins = Known(bindings).origins
        found: dict[relax.Var, _Scores | _Weighted | FoldedValue] = {}
        for var, value in bindings.values.items():
            if operator(value) != "matmul" or not _is_product(bindings, value):
                continue
            if (scores := _scores(bindings, var, origins)) is not None:
                found[scores.out] = scores
            elif (folded := folded_rows(bindings, var, origins)) is not None:
                batch, rows, layout, values = folded
                shared = _Scores(var, value.args[0], value.args[1], False, True, batch, rows, layout, value)
                found |= unfolded_values(bindings, shared, values)
            elif (weighted := _weighted(bindings, var)) is not None:
                found[var] = weighted
        if not found:
            return mod
        return rebuild(mod, lambda builder, var, new: found[var].emit(builder.emit, new) if var in found else None)


@dataclass
class _Scores:
    """q·kᵀ that is reshaped and transposed to `out`.

    q, k : (*batch, rows, D) and (*batch, columns, D), or (…, D, rows) and (…, D, columns) if they are transposed
    batch, rows : their axes
    layout : that of `out`, (…, rows, columns)
    product : the product that is replaced
    """

    out: relax.Var
    q: relax.Expr
    k: relax.Expr
    q_is_transposed: bool
    k_is_transposed: bool
    batch: list[Axis]
    rows: list[Axis]
    layout: Layout
    product: relax.Call

    def emit(self, emit, new):
        """The product of operands whose dimensions are those of `out`."""
        q = _upright(emit, new(self.q), self.q_is_transposed)
        q = _arranged(emit, q, undivided([*self.batch, *self.rows]), self.layout[:-1], shape_of(q)[-1])
        k = _upright(emit, new(self.k), self.k_is_transposed)
        k = _shared(emit, k, undivided(self.batch), self.layout[:-2], shape_of(k)[-2:])
        rank = len(shape_of(k))
        return _product(self.product, q, emit(op.permute_dims(k, [*range(rank - 2), rank - 1, rank - 2])))


@dataclass(frozen=True)
class _Weighted:
    """Weights that are transposed and reshaped to the operand of a product with v.

    weights : as they are before that, (…, Sq, Skv), of this layout
    v : (*batch, Skv, Dv), or (*batch, Dv, Skv) if `product`, the product that is replaced, is transposed
    batch, rows : axes of the operand
    """

    weights: relax.Expr
    v: relax.Expr
    is_transposed: bool
    batch: list[Axis]
    rows: list[Axis]
    layout: Layout
    product: relax.Call

    def emit(self, emit, new):
        """The product with the weights as they are, in the dimensions of the product that it replaces."""
        v = _upright(emit, new(self.v), self.is_transposed)
        v = _shared(emit, v, self.batch, self.layout[:-2], shape_of(v)[-2:])
        out = emit(_product(self.product, new(self.weights), v))
        dim = shape_of(out)[-1]
        wanted = [self.batch, self.rows]
        out = _arranged(emit, out, flat(self.layout[:-1]), wanted, dim)  # (batch, rows, Dv)
        if self.is_transposed:
            out = emit(op.permute_dims(out, [0, 2, 1]))
        return _reshaped(emit, out, shape_of(self.product))


def _is_product(bindings, call) -> bool:
    """Whether a product is of values that are both known at run time only, in the same batches."""
    a, b = (static_shape(x) for x in call.args)
    if a is None or b is None or len(a) != len(b) or len(a) < 2 or a[:-2] != b[:-2]:
        return False
    return not any(bindings.is_weight(x) for x in call.args)


def _scores(bindings, product, origins) -> _Scores | None:
    call = bindings.value(product)
    layout = layout_of(shape_of(call))
    lead, rows, columns = layout[:-2], layout[-2], layout[-1]
    out: relax.Var = product
    best: _Scores | None = None
    while out not in bindings.outputs and len(bindings.readers[out]) == 1:
        (reader,) = bindings.readers[out]
        moved = viewed(bindings.value(reader), layout)
        if moved is None:
            break
        out, layout = reader, moved
        best = _scores_at(bindings, call, out, layout, lead, rows, columns, origins) or best
    return best if best is not None and _leads_to_softmax(bindings, best.out) else None


def _scores_at(bindings, call, out, layout, lead, rows, columns, origins) -> _Scores | None:
    """The scores, if the product's rows and columns are the last two dimensions of `out`, with heads before them.

    A dimension of size 1 has no axes: where that is the queries', the rows are heads.
    """
    if len(layout) < 3:
        return None
    batch, sides = flat(lead), (undivided(rows), undivided(columns))
    last = undivided(layout[-1])
    for (left, right), (a, b), is_turned in ((sides, call.args, False), (sides[::-1], call.args[::-1], True)):
        row = undivided(layout[-2])
        if last == right and all(axis in left for axis in row):
            if not row and not _are_heads(bindings, a, is_turned, origins):
                continue
            heads = [axis for axis in left if axis not in row]
            if not heads and flat(layout[:-2]) == batch:  # the matchers know these
                return None
            return _Scores(out, a, b, is_turned, not is_turned, batch, left, layout, call)
    return None


def _are_heads(bindings, q, is_transposed: bool, origins) -> bool:
    """Whether a weight made all rows of an operand, and they count no tokens: those are a dimension besides.

    What the operand is a view of has a batch and tokens, of which there is one, that no weight made.  A weight that
    mixes tokens makes rows that count them, and no such dimension is left.
    """
    traced = traced_layout(bindings, q, origins)
    if traced is None:
        return False
    given = shape_of(traced.root)
    others = [n for place, n in enumerate(given) if origins.of(traced.root, place) == OTHER]
    if len(others) < 2 or 1 not in others:
        return False
    rows = undivided(traced.layout[-1 if is_transposed else -2])
    return bool(rows) and all(traced.made[axis] == FEATURES for axis in rows)


def _weighted(bindings, product) -> _Weighted | None:
    call = bindings.value(product)
    for index in (0, 1):
        way, expr = [], call.args[index]
        while is_view(bindings.value(expr)) and bindings.readers[expr] == [way[-1] if way else product]:
            way.append(expr)
            expr = bindings.value(expr).args[0]
        if not way or static_shape(expr) is None or not _comes_from_softmax(bindings, expr):
            continue
        layout = layout_of(shape_of(expr))
        moved: Layout | None = layout
        for view in reversed(way):
            moved = None if moved is None else viewed(bindings.value(view), moved)
        if moved is None or len(layout) < 3:
            return None
        rows, keys = (undivided(x) for x in (moved[-2:] if index == 0 else moved[:-3:-1]))
        batch = flat(moved[:-2])
        row = undivided(layout[-2])
        if keys != undivided(layout[-1]) or any(axis not in rows for axis in row):
            return None
        if not row and not _is_of_one_query(bindings, expr):
            return None
        if rows == row and batch == flat(layout[:-2]):  # the matchers know these
            return None
        return _Weighted(expr, call.args[1 - index], index == 1, batch, rows, layout, call)
    return None


def _is_of_one_query(bindings, expr) -> bool:
    """Whether weights are computed, element by element, from a product of their shape: scores of one query a head."""
    pending, seen = [expr], set()
    while pending:
        call = bindings.value(pending.pop())
        if operator(call) == "matmul":
            return static_shape(call) == static_shape(expr)
        for x in call.args if operator(call) else ():
            if isinstance(x, relax.Var) and x not in seen and static_shape(x) == static_shape(expr):
                seen.add(x)
                pending.append(x)
    return False


def _leads_to_softmax(bindings, var) -> bool:
    """Whether a softmax or an exponential reads a value, element by element."""
    pending, seen = [var], {var}
    while pending:
        for reader in bindings.readers[pending.pop()]:
            call = bindings.value(reader)
            if operator(call) in SOFTMAXES:
                return True
            is_alike = operator(call) not in ("", "matmul") and element_count(call) == element_count(var)
            if reader not in seen and (is_alike or operator(call) == "concat"):
                seen.add(reader)
                pending.append(reader)
    return False


def _comes_from_softmax(bindings, expr) -> bool:
    """Whether a value is computed from a softmax or an exponential, element by element."""
    pending, seen = [expr], set()
    while pending:
        call = bindings.value(pending.pop())
        if operator(call) in SOFTMAXES:
            return True
        if operator(call) in ("", "matmul"):
            continue
        for x in call.args:
            if isinstance(x, relax.Var) and x not in seen and element_count(x) == element_count(call):
                seen.add(x)
                pending.append(x)
    return False


def _product(old: relax.Call, a, b) -> relax.Call:
    """The product of two tensors in place of an old one, of the same dtype and module path."""
    new = op.matmul(a, b, out_dtype=None if dtype_of(old) == dtype_of(a) else dtype_of(old))
    return relax.Call(new.op, new.args, new.attrs, new.ty_args, old.span)


def _upright(emit, x, is_transposed: bool):
    if not is_transposed:
        return x
    rank = len(shape_of(x))
    return emit(op.permute_dims(x, [*range(rank - 2), rank - 1, rank - 2]))


def _reshaped(emit, x, shape):
    return x if shape_of(x) == tuple(shape) else emit(op.reshape(x, shape))


def _moved(emit, x, order: list[int]):
    return x if order == sorted(order) else emit(op.permute_dims(x, order))


def _arranged(emit, x, axes: list[Axis], layout: Layout, dim: int):
    """x (*axes, dim) with its axes as in a layout, (*layout, dim)."""
    x = _reshaped(emit, x, [*(axis.size for axis in axes), dim])
    x = _moved(emit, x, [*(axes.index(axis) for axis in flat(layout)), len(axes)])
    return _reshaped(emit, x, [*(size(undivided(dimension)) for dimension in layout), dim])


def _shared(emit, x, batch: list[Axis], layout: Layout, matrix: tuple[int, ...]):
    """x (*batch, *matrix) as (*layout, *matrix): 1 where the layout has heads, which come last and share a matrix.

    Where heads do not come last, or are folded into the batch, the matrix is repeated for each.
    """
    x = _reshaped(emit, x, [*(axis.size for axis in batch), *matrix])
    axes = flat(layout)
    order = [batch.index(axis) for axis in axes if axis in batch]
    x = _moved(emit, x, [*order, len(batch), len(batch) + 1])
    x = _reshaped(emit, x, [*(axis.size if axis in batch else 1 for axis in axes), *matrix])
    kinds = [{axis in batch for axis in undivided(dimension)} for dimension in layout]
    is_head = [kind == {False} for kind in kinds if kind]
    if {True, False} in kinds or is_head != sorted(is_head) or is_head[:1] == [True]:
        x = emit(op.broadcast_to(x, [*(axis.size for axis in axes), *matrix]))
        return _reshaped(emit, x, [*(size(undivided(dimension)) for dimension in layout), *matrix])
    sizes = [1 if kind == {False} else size(undivided(dimension)) for kind, dimension in zip(kinds, layout)]
    return _reshaped(emit, x, [*sizes, *matrix])
