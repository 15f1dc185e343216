"""Block-wise sparse attention on a CPU: two register-tiled products and an online softmax for every listed block.

The tiles are transposed: a vector holds one key's scores with 4 to 16 query rows.  So maxima, sums and rescaling are
element-wise on vectors, keys and values enter as scalars, and head_dim is a loop count of any size.  Full and partial
blocks have separate loops; only the loop over partial blocks reads bitmaps and handles ragged edges.
"""

from dataclasses import dataclass
from typing import ClassVar

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.cpu.cost import block_wise_us
from tir_kernels.attention.cpu.operands import mask_operands, match_lists
from tir_kernels.attention.cpu.vector import (
    LOG2E,
    NEG_INF,
    add_sink,
    biased,
    element,
    exp2,
    lanes,
    log_sum_exp,
    registers,
    splat,
    tanh,
    transpose,
    vector,
    whole,
    without_parameters,
)
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.template import WITH_POSITIONS, all_of_them, no_plan, no_reader, the_default
from tir_kernels.errors import InputError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

NAME = "block-wise"
TARGET_KIND = "llvm"
TAKES_TOKEN_STRIDES = False
plan = no_plan
reader = no_reader
worth_predicting, worth_measuring = the_default, all_of_them

# Keys of a score tile, and value dimensions of an output tile.  With 2 or 4 vectors of rows that makes 8 or 16
# accumulators: enough to hide the latency of a fused multiply-add, and few enough for 16 or 32 registers.
TILE = 4


@dataclass(frozen=True)
class Config:
    """Height and width of a block, query rows by keys: multiples of 16."""

    block_m: int
    block_n: int
    token_stride: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """The configuration as reports show it: "64x32"."""
        return f"{self.block_m}x{self.block_n}"


def unsupported(problem: AttentionProblem, target: tvm.target.Target) -> str | None:
    """Why this template cannot compute the problem on the target, or None."""
    if problem.continues:
        return "cannot continue from an earlier result"
    if problem.has_positions:
        return WITH_POSITIONS
    return None if target.kind.name == TARGET_KIND else f"runs on {TARGET_KIND}, not on {target.kind.name}"


def configs(problem: AttentionProblem, target: tvm.target.Target) -> list[Config]:
    """Block sizes, the default first: tall blocks reuse keys more, but a block must not lie mostly past q_len."""
    heights = [m for m in (64, 32, 16) if m < 2 * problem.q_len] or [16]
    widths = [n for n in (64, 32) if n < 2 * problem.kv_len] or [32]
    if problem.block_map is not None:  # a block lies in one block of the map
        heights = [m for m in heights if problem.block_map.block_m % m == 0]
        widths = [n for n in widths if problem.block_map.block_n % n == 0]
    return [Config(m, n) for m in heights for n in widths]


def predict_us(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, forms: MaskForms | None = None
) -> float:
    """Predicted microseconds of the kernel for a mask, on one processor."""
    return block_wise_us(problem, (forms or MaskForms(problem)).stored((config.block_m, config.block_n)))


def operands(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask | None = None
) -> Operands:
    """The mask's arrays in argument order, as `mask_operands` explains them."""
    if mask is None:
        mask = MaskForms(problem).stored((config.block_m, config.block_n))
    return Operands(tuple(mask_operands(mask, problem)))


def instantiate(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The PrimFunc of the tensors of a problem in their order.

    They are q, k, v, [bias], [key_count], [sink], [block_map], unit_order, head_map, lists, bitmap, out, [lse].

    InputError for a configuration whose blocks do not divide those of the block map.
    """
    p = problem
    width, tile_vectors = lanes(target), 4 if registers(target) == 32 else 2
    block_m, block_n = config.block_m, config.block_n
    n_block_rows = -(-p.q_len // block_m)
    units = p.batch * p.q_heads * n_block_rows
    row_vectors = block_m // width
    tile_vectors = min(tile_vectors, row_vectors)
    row_tiles = row_vectors // tile_vectors
    tiles = block_m * block_n // 64
    value_dims = -(-p.v_head_dim // TILE) * TILE
    ragged_q, ragged_kv = p.q_len % block_m != 0, p.kv_len % block_n != 0
    vec, vec_out = f"float32x{width}", f"{p.dtype}x{width}"
    has_bias = p.bias_shape is not None
    key_bias = p.bias_shape is not None and p.bias_shape[2] == 1
    score_bias = has_bias and not key_bias
    # Computed here: the parser takes a string inside an annotation for the name of a variable.
    q_shape, k_shape, v_shape, out_shape = (p.shape(operand) for operand in ("q", "k", "v", "out"))
    bias_shape, lse_shape = p.bias_shape or (1, 1, 1, 1), p.lse_shape
    has_count, counts = p.has_key_count, max(p.key_counts, 1)
    has_sink, sink_dtype, sinks = p.sink_dtype is not None, p.sink_dtype or "float32", p.q_heads
    has_map, block_map_of = p.block_map is not None, p.block_map or BlockMap(1, 1, block_m, block_n)
    if block_map_of.block_m % block_m or block_map_of.block_n % block_n:
        raise InputError(f"blocks of {config.label} do not divide those of {block_map_of}")
    map_shape = block_map_of.shape(p.q_len, p.kv_len)
    rows_in_map, columns_in_map = block_map_of.block_m // block_m, block_map_of.block_n // block_n
    # Without a bias, scores are kept in units of log2 and exp2 needs no factor.  With one they are not: scaling
    # a bias of finfo.min would overflow to -inf.
    unit, exp_scale = (1.0, LOG2E) if has_bias else (LOG2E, 1.0)
    is_capped, softcap = p.softcap is not None, p.softcap or 1.0
    q_scale = p.scale / softcap if is_capped else p.scale * unit

    def capped(score):
        return tanh(score, width) * splat(softcap * unit, width)

    def power(x):
        return exp2(x if exp_scale == 1.0 else x * splat(exp_scale, width), width)

    def exponential(x):
        return exp2(x * splat(LOG2E, width), width)

    def q_row(r, i):
        """Index of row i of block row r; past q_len that of the last row, whose results are not written again."""
        return T.min(r * block_m + i, p.q_len - 1) if ragged_q else r * block_m + i

    def key(column, j, part):
        """Index of key j of a block; past kv_len that of the last key, which the bitmap then masks."""
        return T.min(column * block_n + j, p.kv_len - 1) if part and ragged_kv else column * block_n + j

    def at(buffer, operand, *logical):
        return buffer[p.index(operand, *logical)]

    def live_keys(column, part):
        """Keys of a block that exist."""
        return T.min(block_n, p.kv_len - column * block_n) if part and ragged_kv else block_n

    def live_row_tiles(r):
        """Row tiles of a block row that have a row which exists."""
        rows = tile_vectors * width
        return T.min(row_tiles, (p.q_len - r * block_m + rows - 1) // rows) if ragged_q else row_tiles

    def value_of(v, b, h_kv, column, j, d, part):
        """Element d of the value of key j; 0 past kv_len, because a weight of 0 times an infinite value is NaN."""
        value = T.cast(at(v, "v", b, h_kv, key(column, j, part), d), "float32")
        return T.Select(column * block_n + j < p.kv_len, value, T.float32(0)) if part and ragged_kv else value

    def bias_at(bias, b, h, i, j):
        return T.cast(bias[p.bias_index(b, h, i, j)], "float32")

    def bias_row(bias, b, h, i, j):
        """`width` elements of a bias row, from key j on."""
        return T.cast(bias[p.bias_index(b, h, i, T.ramp(j, 1, width))], vec)

    def kept(row_bytes, index, j, i):
        """Which of the rows i … i + width - 1 keep key j of partial block `index`."""
        octets = row_bytes[index, T.ramp(j // 8 * block_m + i, 1, width)]
        bit = T.shift_left(T.uint8(1), T.cast(j % 8, "uint8"))
        return (octets & splat(bit, width)) != splat(T.uint8(0), width)

    def selected(block_map, b, h, r, column):
        """Whether the block map keeps block (r, column)."""
        entry = b if map_shape[0] > 1 else 0, h if map_shape[1] > 1 else 0
        return block_map[(*entry, r // rows_in_map, column // columns_in_map)]

    def takes_part(key_count, b, column, j):
        """Whether key j of a block is below the key count."""
        return column * block_n + j < key_count[p.key_count_index(b)]

    def inside(r, i):
        return r * block_m + i < p.q_len if ragged_q else True

    # align=1: tensors of other libraries need not be aligned to a vector, and a load that assumes it would crash.
    @T.prim_func(s_tir=True)
    def block_wise_attention(
        q: T.Buffer(q_shape, p.dtype, align=1),
        k: T.Buffer(k_shape, p.dtype, align=1),
        v: T.Buffer(v_shape, p.dtype, align=1),
        bias: T.Buffer(bias_shape, p.bias_dtype, align=1),
        key_count: T.Buffer((counts,), "int32", align=1),
        sink: T.Buffer((sinks,), sink_dtype, align=1),
        block_map: T.Buffer(map_shape, "bool", align=1),
        unit_order: T.Buffer((units,), "int32"),
        head_map: T.Buffer((p.batch, p.q_heads), "int32"),
        full_row_ptr: T.handle,
        full_col_idx: T.handle,
        part_row_ptr: T.handle,
        part_col_idx: T.handle,
        bitmap: T.handle,
        out: T.Buffer(out_shape, p.dtype, align=1),
        lse: T.Buffer(lse_shape, "float32", align=1),
    ):
        T.func_attr({"tirx.noalias": True, "op_pattern": 8, "tirx.is_scheduled": True})
        lists = T.meta_var(match_lists(full_row_ptr, full_col_idx, part_row_ptr, part_col_idx, bitmap, tiles))
        for u in T.parallel(units):
            with T.sblock("block_row"):
                vu = T.axis.spatial(units, u)
                T.reads(
                    *map(whole, (q, k, v, bias, unit_order, head_map, *lists.buffers)),
                    *map(whole, (key_count,) if has_count else ()),
                    *map(whole, (sink,) if has_sink else ()),
                    *map(whole, (block_map,) if has_map else ()),
                )
                T.writes(*map(whole, (out, lse) if p.gives_lse else (out,)))
                q_t = T.sblock_alloc_buffer((p.head_dim, row_vectors), vec)
                k_tile = T.sblock_alloc_buffer((block_n, p.head_dim), "float32")
                v_tile = T.sblock_alloc_buffer((block_n, value_dims), "float32")
                bias_t = T.sblock_alloc_buffer((block_n, row_vectors), vec)
                s_t = T.sblock_alloc_buffer((block_n, row_vectors), vec)
                o_t = T.sblock_alloc_buffer((value_dims, row_vectors), vec)
                row_max = T.sblock_alloc_buffer((row_vectors,), vec, scope="local")
                row_sum = T.sblock_alloc_buffer((row_vectors,), vec, scope="local")
                new_max = T.sblock_alloc_buffer((row_vectors,), vec, scope="local")
                safe_max = T.sblock_alloc_buffer((row_vectors,), vec, scope="local")
                rescale = T.sblock_alloc_buffer((row_vectors,), vec, scope="local")
                acc = T.sblock_alloc_buffer((TILE, tile_vectors), vec, scope="local")
                tile_max = T.sblock_alloc_buffer((tile_vectors,), vec, scope="local")
                tile_sum = T.sblock_alloc_buffer((tile_vectors,), vec, scope="local")
                square = T.sblock_alloc_buffer((width,), vec, scope="local")
                square_scratch = T.sblock_alloc_buffer((width,), vec, scope="local")
                row_bytes = T.meta_var(lists.row_bytes())
                unit: T.let = unit_order[vu]
                b: T.let = unit // (p.q_heads * n_block_rows)
                h: T.let = unit // n_block_rows % p.q_heads
                r: T.let = unit % n_block_rows
                h_kv: T.let = h // p.group
                row: T.let = head_map[b, h] * n_block_rows + r

                @T.inline
                def load_q():
                    for c, x in T.grid(p.head_dim // width, row_vectors):
                        for i in T.unroll(width):
                            square[i] = T.cast(
                                at(q, "q", b, h, q_row(r, x * width + i), T.ramp(c * width, 1, width)), vec
                            )
                        transpose(square, square_scratch, width)
                        for d in T.unroll(width):
                            q_t[c * width + d, x] = square[d] * splat(q_scale, width)
                    for d0, x in T.grid(p.head_dim % width, row_vectors):
                        d: T.let = p.head_dim // width * width + d0
                        q_t[d, x] = splat(q_scale, width) * vector(
                            [T.cast(at(q, "q", b, h, q_row(r, x * width + i), d), "float32") for i in range(width)]
                        )

                @T.inline
                def load_kv(column, part):
                    for j in T.serial(block_n):
                        for d in T.serial(p.head_dim):
                            k_tile[j, d] = T.cast(at(k, "k", b, h_kv, key(column, j, part), d), "float32")
                    for j in T.serial(block_n):
                        for d in T.serial(p.v_head_dim):
                            v_tile[j, d] = value_of(v, b, h_kv, column, j, d, part)
                        for d in T.serial(value_dims - p.v_head_dim):
                            v_tile[j, p.v_head_dim + d] = T.float32(0)

                @T.inline
                def gather_bias(column, part):
                    for j, x in T.grid(block_n, row_vectors):
                        bias_t[j, x] = vector(
                            [bias_at(bias, b, h, q_row(r, x * width + i), key(column, j, part)) for i in range(width)]
                        )

                @T.inline
                def transpose_bias(column):
                    for c, x in T.grid(block_n // width, row_vectors):
                        for i in T.unroll(width):
                            square[i] = bias_row(bias, b, h, q_row(r, x * width + i), column * block_n + c * width)
                        transpose(square, square_scratch, width)
                        for j in T.unroll(width):
                            bias_t[c * width + j, x] = square[j]

                @T.inline
                def load_bias(column, part):
                    if bias_shape[3] == 1:
                        gather_bias(column, part)
                    elif part and ragged_kv:
                        if (column + 1) * block_n > p.kv_len:
                            gather_bias(column, part)
                        else:
                            transpose_bias(column)
                    else:
                        transpose_bias(column)

                @T.inline
                def scores(column, index, part):
                    """s_t = masked scores of the block; new_max = the larger of row_max and their row maxima."""
                    for x in T.serial(row_vectors):
                        new_max[x] = row_max[x]
                    for t, j0 in T.grid(live_row_tiles(r), (live_keys(column, part) + TILE - 1) // TILE):
                        for j, x in T.grid(TILE, tile_vectors):
                            acc[j, x] = splat(0.0, width)
                        for d in T.serial(p.head_dim):
                            for j in T.unroll(TILE):
                                for x in T.unroll(tile_vectors):
                                    acc[j, x] += splat(k_tile[j0 * TILE + j, d], width) * q_t[d, t * tile_vectors + x]
                        for j in T.unroll(TILE):
                            for x in T.unroll(tile_vectors):
                                if is_capped:
                                    acc[j, x] = capped(acc[j, x])
                                if key_bias:
                                    acc[j, x] = biased(
                                        acc[j, x],
                                        splat(bias_at(bias, b, h, 0, key(column, j0 * TILE + j, part)), width),
                                        width,
                                    )
                                if score_bias:
                                    acc[j, x] = biased(acc[j, x], bias_t[j0 * TILE + j, t * tile_vectors + x], width)
                                if part:
                                    acc[j, x] = T.Select(
                                        kept(row_bytes, index, j0 * TILE + j, (t * tile_vectors + x) * width),
                                        acc[j, x],
                                        splat(NEG_INF, width),
                                    )
                                if has_count:
                                    acc[j, x] = T.Select(
                                        splat(takes_part(key_count, b, column, j0 * TILE + j), width),
                                        acc[j, x],
                                        splat(NEG_INF, width),
                                    )
                                new_max[t * tile_vectors + x] = T.max(new_max[t * tile_vectors + x], acc[j, x])
                                s_t[j0 * TILE + j, t * tile_vectors + x] = acc[j, x]

                @T.inline
                def probabilities(column, part):
                    """s_t = exp(s_t - new maximum); row_max, row_sum and rescale follow the new maximum."""
                    for x in T.unroll(row_vectors):
                        # A row that kept nothing yet has maximum -inf, and -inf - -inf would be NaN.
                        safe_max[x] = T.Select(new_max[x] == splat(NEG_INF, width), splat(0.0, width), new_max[x])
                        rescale[x] = power(row_max[x] - safe_max[x])
                        row_max[x] = new_max[x]
                    for t in T.serial(live_row_tiles(r)):
                        for x in T.unroll(tile_vectors):
                            tile_max[x] = safe_max[t * tile_vectors + x]
                            tile_sum[x] = splat(0.0, width)
                        for j in T.serial(live_keys(column, part)):
                            for x in T.unroll(tile_vectors):
                                s_t[j, t * tile_vectors + x] = power(s_t[j, t * tile_vectors + x] - tile_max[x])
                                tile_sum[x] += s_t[j, t * tile_vectors + x]
                        for x in T.unroll(tile_vectors):
                            row_sum[t * tile_vectors + x] = (
                                row_sum[t * tile_vectors + x] * rescale[t * tile_vectors + x] + tile_sum[x]
                            )

                @T.inline
                def accumulate(column, part):
                    """o_t = rescale * o_t + v_tile transposed @ s_t."""
                    for t, d0 in T.grid(live_row_tiles(r), value_dims // TILE):
                        for d in T.unroll(TILE):
                            for x in T.unroll(tile_vectors):
                                acc[d, x] = o_t[d0 * TILE + d, t * tile_vectors + x] * rescale[t * tile_vectors + x]
                        for j in T.serial(live_keys(column, part)):
                            for d in T.unroll(TILE):
                                for x in T.unroll(tile_vectors):
                                    acc[d, x] += splat(v_tile[j, d0 * TILE + d], width) * s_t[j, t * tile_vectors + x]
                        for d in T.unroll(TILE):
                            for x in T.unroll(tile_vectors):
                                o_t[d0 * TILE + d, t * tile_vectors + x] = acc[d, x]

                @T.inline
                def attend(column, index, part):
                    load_kv(column, part)
                    if score_bias:
                        load_bias(column, part)
                    scores(column, index, part)
                    probabilities(column, part)
                    accumulate(column, part)

                @T.inline
                def attend_if_counted(column, index, part):
                    if has_count:
                        if takes_part(key_count, b, column, 0):
                            attend(column, index, part)
                    else:
                        attend(column, index, part)

                @T.inline
                def attend_if_selected(column, index, part):
                    if has_map:
                        if selected(block_map, b, h, r, column):
                            attend_if_counted(column, index, part)
                    else:
                        attend_if_counted(column, index, part)

                @T.inline
                def with_sink():
                    for x in T.serial(row_vectors):
                        row_max[x] = row_max[x] * splat(exp_scale / LOG2E, width)
                        add_sink(
                            row_max, row_sum, rescale, new_max, x, splat(T.cast(sink[h], "float32"), width), exponential
                        )

                @T.inline
                def store_lse():
                    for x in T.serial(row_vectors):
                        for i in T.unroll(width):
                            if inside(r, x * width + i):
                                lse[b, h, r * block_m + x * width + i] = log_sum_exp(
                                    element(row_max[x], i), element(row_sum[x], i), LOG2E if has_sink else exp_scale
                                )

                @T.inline
                def store_out():
                    if has_sink:
                        with_sink()
                    if p.gives_lse:
                        store_lse()
                    for x in T.serial(row_vectors):
                        # A row that kept nothing has sum 0 and an output of 0.
                        row_sum[x] = T.Select(
                            row_sum[x] == splat(0.0, width),
                            splat(0.0, width),
                            (rescale[x] if has_sink else splat(1.0, width)) / row_sum[x],
                        )
                    for c, x in T.grid(p.v_head_dim // width, row_vectors):
                        for d in T.unroll(width):
                            square[d] = o_t[c * width + d, x] * row_sum[x]
                        transpose(square, square_scratch, width)
                        for i in T.unroll(width):
                            if inside(r, x * width + i):
                                T.buffer_store(
                                    out,
                                    T.cast(square[i], vec_out),
                                    p.index("out", b, h, r * block_m + x * width + i, T.ramp(c * width, 1, width)),
                                )
                    for d0, x in T.grid(p.v_head_dim % width, row_vectors):
                        d: T.let = p.v_head_dim // width * width + d0
                        square[0] = o_t[d, x] * row_sum[x]
                        for i in T.unroll(width):
                            if inside(r, x * width + i):
                                T.buffer_store(
                                    out,
                                    T.cast(element(square[0], i), p.dtype),
                                    p.index("out", b, h, r * block_m + x * width + i, d),
                                )

                load_q()
                for x in T.serial(row_vectors):
                    row_max[x] = splat(NEG_INF, width)
                    row_sum[x] = splat(0.0, width)
                for d, x in T.grid(value_dims, row_vectors):
                    o_t[d, x] = splat(0.0, width)
                for f in T.serial(lists.full_row_ptr[row], lists.full_row_ptr[row + 1]):
                    attend_if_selected(lists.full_col_idx[f], 0, False)
                for f in T.serial(lists.part_row_ptr[row], lists.part_row_ptr[row + 1]):
                    attend_if_selected(lists.part_col_idx[f], f, True)
                store_out()

    function = block_wise_attention.with_attr("global_symbol", "block_wise_attention")
    optional = {"bias": has_bias, "key_count": has_count, "sink": has_sink, "block_map": has_map, "lse": p.gives_lse}
    unused = [name for name, given in optional.items() if not given]
    return without_parameters(function, unused)
