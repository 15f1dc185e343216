"""Which blocks are products with a matrix, and the roles of their axes and operands."""

from dataclasses import dataclass

from tvm import tirx
from tvm.ir import TensorLoad

from relax_passes.schedule.cpu_rules import blocks as blk


@dataclass(frozen=True)
class Contraction:
    """C[outer, m, n] += A[outer, m, k] * B[outer, k, n].

    Axes are given by their position in the block, operands by their position in its reads.  B may be stored
    in panels, B[n // width, k, n % width], and the row of A may be clamped, min(m, last row).
    """

    outer: tuple[int, ...]
    row: int | None
    column: int
    depth: int
    a: int
    b: int
    b_is_transposed: bool


def match_contraction(sch, block) -> Contraction | None:
    """The roles of the axes, or None where the block is not a product with a matrix whose columns are C's last axis."""
    stmt = sch.get(block)
    factors = _factors(stmt)
    if factors is None:
        return None
    left, right, store = (_axes(stmt, access) for access in (*factors, stmt.body))
    depths = [i for i, axis in enumerate(stmt.iter_vars) if axis.iter_type == tirx.IterVar.CommReduce]
    if not left or not right or not store or len(depths) != 1 or factors[0].source.same_as(factors[1].source):
        return None
    depth, column = depths[0], store[-1]
    if column in left:
        left, right, factors = right, left, factors[::-1]
    if column is None or column in left or depth not in left or right[-1] not in (column, depth) or column not in right:
        return None
    spatial = [i for i in range(len(stmt.iter_vars)) if i not in (column, depth)]
    rows = [i for i in spatial if i not in right and not blk.is_one(stmt.iter_vars[i].dom.extent)]
    row = rows[-1] if rows else None
    return Contraction(
        outer=tuple(i for i in spatial if i != row),
        row=row,
        column=column,
        depth=depth,
        a=_position(stmt, factors[0].source),
        b=_position(stmt, factors[1].source),
        b_is_transposed=right[-1] == depth,
    )


def _factors(stmt):
    """The two loads whose product the block sums, or None."""
    store = stmt.body
    if not isinstance(store, tirx.BufferStore) or not isinstance(store.value, tirx.Add):
        return None
    accumulator, product = store.value.a, store.value.b
    if not isinstance(product, tirx.Mul) or not isinstance(accumulator, TensorLoad):
        return None
    both = product.a, product.b
    is_plain = accumulator.source.same_as(store.buffer) and all(isinstance(x, TensorLoad) for x in both)
    return both if is_plain else None


def _axes(stmt, access) -> list[int | None] | None:
    """For each index of a load or store, the position of the block axis that it is; None for a constant index."""
    positions = []
    for index in _plain_indices(access):
        at = [i for i, axis in enumerate(stmt.iter_vars) if axis.var.same_as(index)]
        if not at and not isinstance(index, tirx.IntImm):
            return None
        positions.append(at[0] if at else None)
    return positions


def _plain_indices(access) -> list:
    """The indices of an access; (k, n) for a load from panels, and m for a row that is clamped."""
    if _is_from_panels(access):
        panel, depth, _ = access.indices
        return [depth, panel.a]
    return [index.a if isinstance(index, tirx.Min) else index for index in access.indices]


def _is_from_panels(access) -> bool:
    """Whether the indices are (n // width, k, n % width)."""
    if len(access.indices) != 3:
        return False
    panel, _, within = access.indices
    if not isinstance(panel, tirx.FloorDiv) or not isinstance(within, tirx.FloorMod):
        return False
    widths = [x.b for x in (panel, within) if isinstance(x.b, tirx.IntImm)]
    return panel.a.same_as(within.a) and len(widths) == 2 and int(widths[0]) == int(widths[1])


def _position(stmt, buffer) -> int:
    return next(i for i, region in enumerate(stmt.reads) if region.source.same_as(buffer))
