"""Row-wise sparse attention on a CPU: one query row at a time, with only the keys that it keeps.

The kernel is for decoding, short inputs and very sparse rows, where blocks keep little.  A row first gathers a batch of
its kept columns from its blocks; scores, softmax and output then run over that dense list, vectorised over head_dim.
If there are too few rows for all threads, the blocks of a row are split and the results combined.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.cpu.cost import row_wise_us
from tir_kernels.attention.cpu.operands import mask_operands, match_lists
from tir_kernels.attention.cpu.vector import (
    LOG2E,
    NEG_INF,
    add_sink,
    biased,
    element,
    exp2,
    horizontal_max,
    horizontal_sum,
    lanes,
    log_sum_exp,
    pieces,
    span,
    splat,
    tanh,
    whole,
    without_parameters,
)
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem, View
from tir_kernels.attention.template import WITH_BLOCK_MAP, all_of_them, no_plan, no_reader, the_default
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

NAME = "row-wise"
TARGET_KIND = "llvm"
TAKES_TOKEN_STRIDES = False
plan = no_plan
reader = no_reader
worth_predicting, worth_measuring = the_default, all_of_them

BATCH = 64  # kept columns that a row gathers before it computes: amortises the softmax, stays in the L1 cache
PARALLEL_UNITS = 16  # units of work below which rows are split
SPLIT_KEYS = 512  # keys that a split should have at least


@dataclass(frozen=True)
class Config:
    """Height and width of a block (query rows by keys), and the number of splits of a row's blocks."""

    block_m: int
    block_n: int
    splits: int
    token_stride: ClassVar[int] = 1

    @property
    def label(self) -> str:
        """The configuration as reports show it: "8x64 2 splits"."""
        return f"{self.block_m}x{self.block_n}" + (f" {self.splits} splits" if self.splits > 1 else "")


def unsupported(problem: AttentionProblem, target: tvm.target.Target) -> str | None:
    """Why this template cannot compute the problem on the target, or None."""
    if problem.continues:
        return "cannot continue from an earlier result"
    if problem.block_map is not None:
        return WITH_BLOCK_MAP
    return None if target.kind.name == TARGET_KIND else f"runs on {TARGET_KIND}, not on {target.kind.name}"


def configs(problem: AttentionProblem, target: tvm.target.Target) -> list[Config]:
    """Block sizes and splits; the default first."""
    units = problem.batch * problem.q_heads * -(-problem.q_len // _rows_of_unit(problem, 8))
    splits = 1
    while units * splits < PARALLEL_UNITS and problem.kv_len >= 2 * splits * SPLIT_KEYS:
        splits *= 2
    return [Config(8, n, s) for s in dict.fromkeys((splits, 1)) for n in (64, 32)]


def _rows_of_unit(problem: AttentionProblem, block_m: int) -> int:
    """Query rows that are computed one after another: those of a block row, or one if each has its own block row."""
    return 1 if problem.has_positions else block_m


def predict_us(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, forms: MaskForms | None = None
) -> float:
    """Predicted microseconds of the kernel for a mask, on one processor."""
    return row_wise_us(problem, (forms or MaskForms(problem)).stored((config.block_m, config.block_n)))


def operands(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask | None = None
) -> Operands:
    """The mask's arrays in argument order, as `mask_operands` explains them."""
    if mask is None:
        mask = MaskForms(problem).stored((config.block_m, config.block_n))
    return Operands(tuple(mask_operands(mask, problem)))


def instantiate(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The PrimFunc of the tensors of a problem in their order.

    They are q, k, v, [bias], [key_count], [sink], [positions], unit_order, head_map, lists, bitmap, out, [lse].
    """
    p = problem
    width = lanes(target)
    block_m, block_n, splits = config.block_m, config.block_n, config.splits
    outputs = lambda out, lse: (out, lse) if p.gives_lse else (out,)
    unit_m = _rows_of_unit(p, block_m)
    n_unit_rows, n_block_rows = -(-p.q_len // unit_m), -(-p.mask_rows // block_m)
    units = p.batch * p.q_heads * n_unit_rows
    tiles = block_m * block_n // 64
    capacity = BATCH + block_n
    vec = f"float32x{width}"
    has_bias = p.bias_shape is not None
    # Computed here: the parser takes a string inside an annotation for the name of a variable.
    q_shape, k_shape, v_shape, out_shape = (p.shape(operand) for operand in ("q", "k", "v", "out"))
    bias_shape, lse_shape = p.bias_shape or (1, 1, 1, 1), p.lse_shape
    n_positions, n_rows = p.q_len, p.mask_rows
    has_count, counts = p.has_key_count, max(p.key_counts, 1)
    has_sink, sink_dtype, sinks = p.sink_dtype is not None, p.sink_dtype or "float32", p.q_heads
    # As in block_wise.py: only scores without a bias may be kept in units of log2.
    unit, exp_scale = (1.0, LOG2E) if has_bias else (LOG2E, 1.0)
    is_capped, softcap = p.softcap is not None, p.softcap or 1.0
    q_scale = p.scale / softcap if is_capped else p.scale * unit

    # TVM 0.27 does not compile a list that nothing reads, as when all tokens share one key and one value.
    repeats = [isinstance(layout, View) and layout.token == 0 for layout in (p.layouts.k, p.layouts.v)]
    lists_columns = not all(repeats) or (has_bias and bias_shape[3] > 1)

    def mask_row(positions, s):
        """The row of the mask for query s; a row that exists even if its position is outside of the mask."""
        position = T.Select(positions[s] < 0, positions[s] + n_rows, positions[s])
        return T.cast(T.max(T.min(position, T.int64(n_rows - 1)), T.int64(0)), "int32")

    def block_row(positions, r):
        return T.truncdiv(mask_row(positions, r), block_m) if p.has_positions else r

    def row_of_block(positions, r, i):
        return T.truncmod(mask_row(positions, r), block_m) if p.has_positions else i

    def counted(key_count, b, first):
        """How many of a block's keys, from `first` on, are below the key count."""
        if not has_count:
            return block_n
        return T.max(T.min(key_count[p.key_count_index(b)] - first, block_n), 0)

    def takes_part(key_count, b, column):
        """1 for a key below the key count, else 0."""
        return T.cast(column < key_count[p.key_count_index(b)], "int32") if has_count else T.int32(1)

    def no_sum(positions, r):
        """The sum of no exponentials, NaN for a position outside of the mask: the row's result is NaN, too."""
        if not p.has_positions:
            return 0.0
        is_inside = T.And(positions[r] >= -n_rows, positions[r] < n_rows)
        return T.Select(is_inside, T.float32(0), T.float32(math.nan))

    def power(x):
        return exp2(x if exp_scale == 1.0 else x * splat(exp_scale, width), width)

    def exponential(x):
        return element(exp2(splat(x * T.float32(LOG2E), width), width), 0)

    def load(buffer, operand, b, h, s, start, size):
        """`size` elements of a row of q, k or v, in float32."""
        value = buffer[p.index(operand, b, h, s, span(start, size))]
        return T.cast(value, "float32" if size == 1 else f"float32x{size}")

    def load_q(q_row, q, b, h, s):
        for start, size in pieces(p.head_dim, width):
            T.buffer_store(q_row, load(q, "q", b, h, s, start, size) * splat(q_scale, size), [span(start, size)])

    def store_score(s_row, j, products, q_row, k, bias, b, h, s, column):
        """Store the score of one key in s_row[j]: add products for each vector size, then the elements of the sums."""
        sums = {}
        for start, size in pieces(p.head_dim, width):
            product = q_row[span(start, size)] * load(k, "k", b, h // p.group, column, start, size)
            sums[size] = sums[size] + product if size in sums else product
        for size, value in sums.items():
            T.buffer_store(products, value, [span(2 * (width - size), size)])
        total = sum(horizontal_sum(products[span(2 * (width - size), size)], size) for size in sums)
        T.buffer_store(s_row, total, [j])
        if has_bias and not is_capped:
            add_bias(s_row, j, bias, b, h, s, column)

    def add_bias(s_row, j, bias, b, h, s, column):
        total = biased(s_row[j], T.cast(bias[p.bias_index(b, h, s, column)], "float32"), 1)
        T.buffer_store(s_row, total, [j])

    def cap(s_row, c):
        """Cap a vector of scores before their bias."""
        at = span(c * width, width)
        T.buffer_store(s_row, tanh(s_row[at], width) * splat(softcap * unit, width), [at])

    def reciprocal(total):
        """1 / total; 0 for the sum of a row that kept nothing."""
        return T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total)

    def clear(o_row):
        for start, size in pieces(p.v_head_dim, width):
            T.buffer_store(o_row, splat(0.0, size), [span(start, size)])

    def scale_row(o_row, factor):
        for start, size in pieces(p.v_head_dim, width):
            T.buffer_store(o_row, o_row[span(start, size)] * splat(factor, size), [span(start, size)])

    def add_value(o_row, v, b, h, column, weight):
        for start, size in pieces(p.v_head_dim, width):
            value = load(v, "v", b, h // p.group, column, start, size)
            T.buffer_store(o_row, o_row[span(start, size)] + splat(weight, size) * value, [span(start, size)])

    def store_out(out, o_row, b, h, s, factor):
        for start, size in pieces(p.v_head_dim, width):
            value = o_row[span(start, size)] * splat(factor, size)
            dtype = p.dtype if size == 1 else f"{p.dtype}x{size}"
            T.buffer_store(out, T.cast(value, dtype), p.index("out", b, h, s, span(start, size)))

    @T.inline
    def store_with_sink(out, lse, o_row, sink, top, total, factor, logit, b, h, s):
        """Write the row with maximum top[0] (a natural logarithm) and sum total[0], with the sink's term added."""
        add_sink(top, total, factor, logit, 0, T.cast(sink[h], "float32"), exponential)
        store_out(out, o_row, b, h, s, reciprocal(total[0]) * factor[0])
        if p.gives_lse:
            lse[b, h, s] = log_sum_exp(top[0], total[0], LOG2E)

    # align=1: tensors of other libraries need not be aligned to a vector, and a load that assumes it would crash.
    @T.prim_func(s_tir=True)
    def row_wise_attention(
        q: T.Buffer(q_shape, p.dtype, align=1),
        k: T.Buffer(k_shape, p.dtype, align=1),
        v: T.Buffer(v_shape, p.dtype, align=1),
        bias: T.Buffer(bias_shape, p.bias_dtype, align=1),
        key_count: T.Buffer((counts,), "int32", align=1),
        sink: T.Buffer((sinks,), sink_dtype, align=1),
        positions: T.Buffer((n_positions,), "int64", align=1),
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
        # For each split of each row: maximum, sum, and output before the division by the sum.
        split_max = T.sblock_alloc_buffer((units * unit_m, splits), "float32")
        split_sum = T.sblock_alloc_buffer((units * unit_m, splits), "float32")
        split_out = T.sblock_alloc_buffer((units * unit_m, splits, p.v_head_dim), "float32")
        for u in T.parallel(units * splits):
            with T.sblock("block_row"):
                vu = T.axis.spatial(units * splits, u)
                T.reads(
                    *map(whole, (q, k, v, bias, unit_order, head_map, *lists.buffers)),
                    *map(whole, (key_count,) if has_count else ()),
                    *map(whole, (sink,) if has_sink and splits == 1 else ()),
                    *map(whole, (positions,) if p.has_positions else ()),
                )
                T.writes(*map(whole, outputs(out, lse) if splits == 1 else (split_max, split_sum, split_out)))
                q_row = T.sblock_alloc_buffer((p.head_dim,), "float32", scope="local")
                o_row = T.sblock_alloc_buffer((p.v_head_dim,), "float32", scope="local")
                products = T.sblock_alloc_buffer((2 * width,), "float32", scope="local")
                columns = T.sblock_alloc_buffer((capacity + 1,), "int32", scope="local")
                s_row = T.sblock_alloc_buffer((capacity + width,), "float32", scope="local")
                gathered = T.sblock_alloc_buffer((1,), "int32", scope="local")
                row_max = T.sblock_alloc_buffer((1,), "float32", scope="local")
                new_max = T.sblock_alloc_buffer((1,), "float32", scope="local")
                safe_max = T.sblock_alloc_buffer((1,), "float32", scope="local")
                rescale = T.sblock_alloc_buffer((1,), "float32", scope="local")
                lane_max = T.sblock_alloc_buffer((1,), vec, scope="local")
                lane_sum = T.sblock_alloc_buffer((1,), vec, scope="local")
                row_bytes = T.meta_var(lists.row_bytes())
                unit: T.let = unit_order[vu // splits]
                split: T.let = vu % splits
                b: T.let = unit // (p.q_heads * n_unit_rows)
                h: T.let = unit // n_unit_rows % p.q_heads
                r: T.let = unit % n_unit_rows
                row: T.let = head_map[b, h] * n_block_rows + block_row(positions, r)
                full: T.let = lists.full_row_ptr[row + 1] - lists.full_row_ptr[row]
                blocks: T.let = full + lists.part_row_ptr[row + 1] - lists.part_row_ptr[row]
                first: T.let = blocks * split // splits
                last: T.let = blocks * (split + 1) // splits

                @T.inline
                def gather_full(column):
                    if lists_columns:
                        for j in T.serial(block_n):
                            columns[gathered[0] + j] = column * block_n + j
                    gathered[0] += counted(key_count, b, column * block_n)

                @T.inline
                def gather_part(column, index, i):
                    for c in T.serial(block_n // 8):
                        octet: T.let = T.cast(row_bytes[index, c * block_m + row_of_block(positions, r, i)], "int32")
                        if octet != 0:
                            for j in T.unroll(8):
                                if lists_columns:
                                    columns[gathered[0]] = column * block_n + c * 8 + j
                                gathered[0] += (octet >> j) & 1 & takes_part(key_count, b, column * block_n + c * 8 + j)

                @T.inline
                def attend(s):
                    """Add the gathered columns to the row's softmax and output."""
                    for j in T.serial(gathered[0]):
                        store_score(s_row, j, products, q_row, k, bias, b, h, s, columns[j])
                    if is_capped:
                        for c in T.serial((gathered[0] + width - 1) // width):
                            cap(s_row, c)
                        if has_bias:
                            for j in T.serial(gathered[0]):
                                add_bias(s_row, j, bias, b, h, s, columns[j])
                    for j in T.serial(width):
                        s_row[gathered[0] + j] = T.float32(NEG_INF)
                    lane_max[0] = splat(row_max[0], width)
                    for c in T.serial((gathered[0] + width - 1) // width):
                        lane_max[0] = T.max(lane_max[0], s_row[span(c * width, width)])
                    new_max[0] = horizontal_max(lane_max[0], width)
                    # A row that kept nothing yet has maximum -inf, and -inf - -inf would be NaN.
                    safe_max[0] = T.Select(new_max[0] == T.float32(NEG_INF), T.float32(0), new_max[0])
                    rescale[0] = element(power(splat(row_max[0] - safe_max[0], width)), 0)
                    row_max[0] = new_max[0]
                    lane_sum[0] = lane_sum[0] * splat(rescale[0], width)
                    for c in T.serial((gathered[0] + width - 1) // width):
                        s_row[span(c * width, width)] = power(s_row[span(c * width, width)] - splat(safe_max[0], width))
                        lane_sum[0] += s_row[span(c * width, width)]
                    scale_row(o_row, rescale[0])
                    for j in T.serial(gathered[0]):
                        add_value(o_row, v, b, h, columns[j], s_row[j])
                    gathered[0] = 0

                for i in T.serial(T.min(unit_m, p.q_len - r * unit_m)):
                    load_q(q_row, q, b, h, r * unit_m + i)
                    clear(o_row)
                    gathered[0] = 0
                    # If tokens have stride 0, as a single token has, nothing reads `columns`.  This store says that the
                    # buffer begins at 0; without it, TVM would let it begin where the last columns were gathered.
                    columns[0] = 0
                    row_max[0] = T.float32(NEG_INF)
                    lane_sum[0] = splat(no_sum(positions, r), width)
                    for f in T.serial(first, last):
                        if f < full:
                            gather_full(lists.full_col_idx[lists.full_row_ptr[row] + f])
                        else:
                            part: T.let = lists.part_row_ptr[row] + f - full
                            gather_part(lists.part_col_idx[part], part, i)
                        if gathered[0] >= BATCH or (f == last - 1 and gathered[0] > 0):
                            attend(r * unit_m + i)
                    total: T.let = horizontal_sum(lane_sum[0], width)
                    if splits == 1:
                        if has_sink:
                            row_max[0] = row_max[0] * T.float32(exp_scale / LOG2E)
                            new_max[0] = total
                            store_with_sink(
                                out, lse, o_row, sink, row_max, new_max, rescale, safe_max, b, h, r * unit_m + i
                            )
                        else:
                            store_out(out, o_row, b, h, r * unit_m + i, reciprocal(total))
                            if p.gives_lse:
                                lse[b, h, r * unit_m + i] = log_sum_exp(row_max[0], total, exp_scale)
                    else:
                        split_max[unit * unit_m + i, split] = row_max[0]
                        split_sum[unit * unit_m + i, split] = total
                        for d in T.serial(p.v_head_dim):
                            split_out[unit * unit_m + i, split, d] = o_row[d]
        if splits > 1:
            for u in T.parallel(units * unit_m):
                with T.sblock("combine"):
                    vu = T.axis.spatial(units * unit_m, u)
                    T.reads(*map(whole, (split_max, split_sum, split_out, *((sink,) if has_sink else ()))))
                    T.writes(*map(whole, outputs(out, lse)))
                    o_row = T.sblock_alloc_buffer((p.v_head_dim,), "float32", scope="local")
                    row_max = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    row_sum = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    weight = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    if has_sink:
                        logit = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    s: T.let = vu // unit_m % n_unit_rows * unit_m + vu % unit_m
                    h: T.let = vu // unit_m // n_unit_rows % p.q_heads
                    b: T.let = vu // unit_m // n_unit_rows // p.q_heads
                    if s < p.q_len:
                        row_max[0] = split_max[vu, 0]
                        for split in T.serial(splits):
                            row_max[0] = T.max(row_max[0], split_max[vu, split])
                        row_max[0] = T.Select(row_max[0] == T.float32(NEG_INF), T.float32(0), row_max[0])
                        row_sum[0] = T.float32(0)
                        clear(o_row)
                        for split in T.serial(splits):
                            weight[0] = element(power(splat(split_max[vu, split] - row_max[0], width)), 0)
                            row_sum[0] += weight[0] * split_sum[vu, split]
                            for d in T.serial(p.v_head_dim):
                                o_row[d] += weight[0] * split_out[vu, split, d]
                        if has_sink:
                            row_max[0] = T.Select(
                                row_sum[0] == T.float32(0),
                                T.float32(NEG_INF),
                                row_max[0] * T.float32(exp_scale / LOG2E),
                            )
                            store_with_sink(out, lse, o_row, sink, row_max, row_sum, weight, logit, b, h, s)
                        else:
                            store_out(out, o_row, b, h, s, reciprocal(row_sum[0]))
                            if p.gives_lse:
                                lse[b, h, s] = log_sum_exp(row_max[0], row_sum[0], exp_scale)

    function = row_wise_attention.with_attr("global_symbol", "row_wise_attention")
    optional = {
        "bias": has_bias,
        "key_count": has_count,
        "sink": has_sink,
        "positions": p.has_positions,
        "lse": p.gives_lse,
    }
    return without_parameters(function, [name for name, given in optional.items() if not given])
