"""The thread of the warp-specialized kernel that copies: it takes items and sends their queries, keys and values.

All copies are the tensor memory accelerator's.  Each operand has a map of four dimensions (dim, token, head, batch), so
rows past the end of a head arrive as zeros, and so do columns past a head's size.  With a token stride a map has five
(dim, position, class, head, batch): position p of class c is token c + p * stride.  Where some classes have a position
more than others, those have a map of their own.
"""

from types import SimpleNamespace
from typing import NamedTuple

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.attention.problem import AttentionProblem, View
from tir_kernels.attention.warp_specialized.geometry import ITEM_BYTES, WORD_BYTES, Geometry
from tir_kernels.attention.warp_specialized.work import Item
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES, PanelTile

COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
COPY_LINE = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
# Arguments of the driver's cuTensorMapEncodeTiled.
NO_INTERLEAVE, PROMOTE_256B, ZERO_FILL = 0, 3, 0
SWIZZLES = {128: 3, 64: 2, 32: 1}  # by the bytes of a box's row


def strides(problem: AttentionProblem, operand: str) -> tuple[int, int, int]:
    """Elements from one batch entry, head and token of an input to the next; 0 where one is repeated."""
    layout = getattr(problem.layouts, operand)
    if isinstance(layout, View):
        return layout.batch, layout.head, layout.token
    shape, steps, step = problem.shape(operand), {}, 1
    for dimension, size in zip(reversed(layout), reversed(shape)):
        steps[dimension] = step
        step *= size
    return steps["b"], steps["h"], steps["s"]


def class_sizes(tokens: int, stride: int) -> list[int]:
    """The positions that classes of tokens have, the largest number first: one or two numbers.

    The first `tokens % stride` classes have the most.
    """
    return sorted({-(-tokens // stride), max(tokens // stride, 1)}, reverse=True)


def tensor_map_fields(
    problem: AttentionProblem, operand: str, tile: PanelTile, rows: int | None = None, stride: int = 1
) -> list[tuple[int, ...]]:
    """Fields of each map of "q", "k" or "v", copied to panels of a tile: sizes, strides, box, modes.

    There is a map for each of `class_sizes`.  So many `rows` are copied at a time, all of the tile's by default.  A
    repeated batch entry or head is a dimension of size 1.
    """
    batch, heads, tokens, dim = problem.logical_shape(operand)
    by_batch, by_head, by_token = strides(problem, operand)
    unused = by_token or dim  # the distance of what there is only one of: any that a map may have
    found = []
    for positions in class_sizes(tokens, stride):
        # (size, elements from one to the next) of every dimension after the first
        outer = [(positions, unused * stride), (min(stride, tokens), unused)] if stride > 1 else [(tokens, unused)]
        outer += [(heads if by_head else 1, by_head or unused), (batch if by_batch else 1, by_batch or unused)]
        sizes, distances = zip(*outer)
        one_each = (1,) * (len(outer) - 1)
        box, steps = (tile.panel, rows or tile.rows, *one_each), (1, 1, *one_each)
        modes = (NO_INTERLEAVE, SWIZZLES[tile.pitch], PROMOTE_256B, ZERO_FILL)
        found.append((dim, *sizes, *(d * ELEMENT_BYTES for d in distances), *box, *steps, *modes))
    return found


class OperandMaps(NamedTuple):
    """The maps of an operand: one, or with a token stride one for each size of a class."""

    operand: str
    maps: list
    tokens: int
    repeated: list[bool]  # whether all batch entries, heads, tokens are one


def tensor_maps(g: Geometry, q, k, v) -> list[OperandMaps]:
    """The maps of q, k and v, which the host encodes before each launch; call it while a kernel is parsed."""
    buffers, tiles = {"q": q, "k": k, "v": v}, {"q": g.q_tile, "k": g.k_tile, "v": g.v_tile}
    rows = {"q": g.config.block_m, "k": g.config.block_n, "v": g.config.block_n}
    stride, found = g.config.token_stride, []
    for name in buffers:
        tokens = g.problem.logical_shape(name)[2]
        maps = [T.let[T.handle("tensormap")].as_var() for _ in class_sizes(tokens, stride)]
        for suffix, tensor_map in zip(("", "_of_fewer"), maps):
            T.Bind(T.tvm_stack_alloca("tensormap", 1), var=IRBuilder.name(f"{name}_map{suffix}", tensor_map))
        found.append(OperandMaps(name, maps, tokens, [step == 0 for step in strides(g.problem, name)]))
    for name, maps, *_ in found:
        layout = getattr(g.problem.layouts, name)
        offset = layout.offset if isinstance(layout, View) else 0
        start = buffers[name].ptr_to([offset]) if offset else buffers[name].data
        for tensor_map, fields in zip(maps, tensor_map_fields(g.problem, name, tiles[name], rows[name], stride)):
            encode, rank = "runtime.cuTensorMapEncodeTiled", (len(fields) - 3) // 4
            T.evaluate(T.call_packed(encode, tensor_map, g.problem.dtype, rank, start, *fields))
    return found


def producer_functions(g: Geometry, rings, ring):
    """`look_up`, `send_item` and `send_blocks` for each item, `send_values` and `send_end` after the last."""
    problem, group, together, stride = g.problem, g.problem.group, g.config.together, g.config.token_stride

    def kv_head(q_head):
        """(head, batch entry) of the keys and values of a head of q."""
        return q_head % problem.q_heads // group, q_head // problem.q_heads

    def map_of(operand: OperandMaps, token):
        """Address of the map for the class that a token is of."""
        largest, *others = [T.address_of(tensor_map) for tensor_map in operand.maps]
        return T.Select(T.truncmod(token, stride) < operand.tokens % stride, largest, *others) if others else largest

    def places_of(token):
        """The coordinates of a token."""
        return [token] if stride == 1 else [T.truncdiv(token, stride), T.truncmod(token, stride)]

    @T.inline
    def copy_tile(tile: PanelTile, to, operand: OperandMaps, row, head, batch, arrived):
        for panel in T.unroll(tile.panels):
            T.ptx[COPY.format(4 if stride == 1 else 5)](
                address(to + panel * tile.panel_bytes),
                map_of(operand, row),
                panel * tile.panel,
                *places_of(row),
                0 if operand.repeated[1] else head,
                0 if operand.repeated[0] else batch,
                arrived,
            )

    def item_field(base, t, field: int):
        return address(base + (g.item_offset + field * WORD_BYTES) + rings.q.stage(t) * ITEM_BYTES)

    @T.inline
    def read_entry(entries, tile, entry):
        """Read the first block of a tile."""
        for i in T.unroll(2):
            entry[i] = entries[tile * together, i]

    @T.inline
    def look_up(items, entries, item, count, work, entry):
        """Read an item of this number, if there is one, and the first block of its first tile.

        work becomes [head of q, first tile, past the last tile, first row].
        """
        if item < count:
            work[0] = items[item, Item.HEAD]
            work[1] = items[item, Item.BEGIN]
            work[2] = items[item, Item.END]
            work[3] = items[item, Item.FIRST_ROW]
            read_entry(entries, work[1], entry)

    @T.inline
    def send_item(base, q_map, items, item, work, t):
        """Send the fields and the queries of the CTA's t-th item, when those of the one before have been read."""
        ring.await_read(rings.q, base, t)
        arrived = rings.q.arrived(base, t)
        T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](arrived, T.uint32(g.q_tile.size + ITEM_BYTES))
        T.ptx[COPY_LINE](item_field(base, t, 0), items.ptr_to([item, 0]), T.uint32(ITEM_BYTES), arrived)
        copy_tile(
            g.q_tile, base + rings.q.stage(t) * g.q_bytes, q_map,
            work[3], work[0] % problem.q_heads, work[0] // problem.q_heads, arrived,
        )  # fmt: skip

    @T.inline
    def send_end(base, t):
        """Tell the warps that compute that there is no t-th item."""
        ring.await_read(rings.q, base, t)
        T.ptx["st.shared.b32"](item_field(base, t, Item.HEAD), T.int32(-1))
        T.ptx["mbarrier.arrive.shared::cta.b64"](rings.q.arrived(base, t), T.uint32(1))

    # A tile's other entries lie beside its first in the L1 cache: there are no registers for all of them.
    def field_of(entries, tile, i, field, first):
        """A field of the i-th block of a tile; that of the first block is known."""
        return first if together == 1 else entries[tile * together + i, field]

    @T.inline
    def copy_blocks(shared: PanelTile, to, operand: OperandMaps, entries, tile, first_key, head, batch, arrived):
        """Copy the blocks of a tile."""
        for i in T.unroll(together):
            start = T.meta_var(to + i * (g.config.block_n * shared.pitch))
            key = T.meta_var(field_of(entries, tile, i, 0, first_key))
            copy_tile(shared, start, operand, key, head, batch, arrived)

    @T.inline
    def send_keep_bits(base, keep_bits, entries, tile, part, stage, arrived):
        """Send those of a tile's blocks, of which the first has the row `part`."""
        to = T.meta_var(base + g.keep_offset + stage * g.keep_bytes)
        for i in T.unroll(together):
            row = T.meta_var(field_of(entries, tile, i, 1, part))
            T.ptx[COPY_LINE](
                address(to + i * g.block_keep_bytes),
                keep_bits.ptr_to([row, 0, 0, 0]),
                T.uint32(g.block_keep_bytes),
                arrived,
            )

    @T.inline
    def send_keys(base, k_map, keep_bits, entries, tile, first_key, part, head, batch, c):
        ring.await_read(rings.k, base, c)
        arrived = rings.k.arrived(base, c)
        stage = rings.k.stage(c)
        if part >= 0:
            T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](arrived, T.uint32(g.k_tile.size + g.keep_bytes))
            send_keep_bits(base, keep_bits, entries, tile, part, stage, arrived)
        else:
            T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](arrived, T.uint32(g.k_tile.size))
        to = T.meta_var(base + g.k_offset + stage * g.k_tile.size)
        copy_blocks(g.k_tile, to, k_map, entries, tile, first_key, head, batch, arrived)

    @T.inline
    def send_values(base, v_map, entries, sent, c):
        """Send the values of tile c - 1, whose keys were the last to be sent, if there is one; `sent` describes it."""
        if sent[0] >= 0:
            ring.await_read(rings.v, base, c - 1)
            arrived = rings.v.arrived(base, c - 1)
            T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](arrived, T.uint32(g.v_tile.size))
            to = T.meta_var(base + g.v_offset + rings.v.stage(c - 1) * g.v_tile.size)
            head, batch = T.meta_var(kv_head(sent[0]))
            copy_blocks(g.v_tile, to, v_map, entries, sent[2], sent[1], head, batch, arrived)

    @T.inline
    def send_blocks(base, k_map, v_map, entries, keep_bits, work, entry, sent, c, take):
        """Send the item's tiles, the values of each after the keys of the next one, be that another item's.

        c[0] counts tiles.  sent becomes [head of q, first key, tile] of the last one, whose values are not sent yet.
        Before the keys of that one `take()` asks for the next item.  Not sooner: a CTA with a long item would take
        another one that CTAs with short items have time for.
        """
        head, batch = T.meta_var(kv_head(work[0]))
        following = T.alloc_local([2], "int32")
        # Before the waits, or where maps are chosen, which takes registers, when the keys' entry is done with.
        early = T.meta_var(not g.chooses_maps)
        while work[1] < work[2]:
            work[1] = work[1] + 1
            if early:
                read_entry(entries, work[1], following)
            if work[1] == work[2]:
                take()
            send_keys(base, k_map, keep_bits, entries, work[1] - 1, entry[0], entry[1], head, batch, c[0])
            if not early:
                read_entry(entries, work[1], following)
            send_values(base, v_map, entries, sent, c[0])
            sent[0] = work[0]
            sent[1] = entry[0]
            sent[2] = work[1] - 1
            for i in T.unroll(2):
                entry[i] = following[i]
            c[0] = c[0] + 1

    return SimpleNamespace(
        look_up=look_up, send_item=send_item, send_blocks=send_blocks, send_values=send_values, send_end=send_end
    )
