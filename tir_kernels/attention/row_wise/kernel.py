"""Row-wise sparse attention on CUDA (sm_80 and up), for decoding: at most 16 queries against a long key/value cache.

The kernel is bound by memory, so every byte of a kept key or value is read once.  The query rows that share a key/value
head form one tensor-core tile, and only the keys and values of tokens that one of these rows keeps are gathered.  Each
warp gathers its own tokens by cp.async and never waits for another warp.  Long lists are split among CTAs, and the CTA
that finishes last merges the results of all (split-KV, as in FlashDecoding).
"""

import math

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.block_wise.cost import predict_row_wise_us
from tir_kernels.attention.block_wise.geometry import unaligned
from tir_kernels.attention.block_wise.softmax import LOG2E, NEGATIVE_INFINITY, before_bias, softmax_functions
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem, View
from tir_kernels.attention.products import matrix_products
from tir_kernels.attention.row_wise.gather import score_bias, token_gather
from tir_kernels.attention.row_wise.geometry import TOKENS, RowWiseConfig, RowWiseGeometry
from tir_kernels.attention.row_wise.merge import AT_ONCE, VECTOR, output_store, partial_results
from tir_kernels.attention.row_wise.operands import row_wise_operands
from tir_kernels.attention.row_wise.plan import row_plan
from tir_kernels.attention.template import WITH_BLOCK_MAP, WITH_KEY_COUNT, Plan, all_of_them, no_reader, the_default
from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.arrival import arrive
from tir_kernels.cuda.device import gpu_of
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import MMA_ROWS
from tir_kernels.cuda.tile import tile_copy
from tir_kernels.errors import UnsupportedError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

NAME = "row-wise"
TARGET_KIND = "cuda"
Config = RowWiseConfig
TAKES_TOKEN_STRIDES = False
worth_predicting, worth_measuring = the_default, all_of_them
reader = no_reader
MAX_INT32 = 2**31 - 1


def unsupported(problem: AttentionProblem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if problem.continues:
        return "cannot continue from an earlier result"
    if problem.block_map is not None:
        return WITH_BLOCK_MAP
    if problem.has_key_count:
        return WITH_KEY_COUNT
    if problem.q_len > Config.block_m:
        return f"q_len={problem.q_len} is more than {Config.block_m} queries: the kernel is for decoding"
    reason = unaligned(problem)
    if reason is not None:
        return reason
    for operand in ("q", "out", *(x for x in "kv" if isinstance(getattr(problem.layouts, x), View))):
        if _elements(problem, operand) > MAX_INT32:
            return f"{operand} of shape {problem.shape(operand)} has 2^31 elements or more; its indices are 32-bit"
    if not configs(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return None


def configs(problem: AttentionProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory; the default first."""
    limit = int(target.attrs["max_shared_memory_per_block"])
    candidates = [Config(warps, stages) for warps in (4, 8, 2) for stages in (3, 2, 4)]
    geometries = [RowWiseGeometry(problem, config) for config in candidates]
    return [g.config for g in geometries if g.ctas_per_multiprocessor and g.shared_bytes <= limit]


def _elements(problem, operand) -> int:
    return math.prod(problem.shape(operand))


def predict_us(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, forms: MaskForms | None = None
) -> float:
    """Predicted microseconds of the kernel for a mask, whatever the configuration."""
    mask = (forms or MaskForms(problem)).stored((config.block_m, config.block_n))
    return predict_row_wise_us(problem, mask, gpu_of(target))


def operands(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask | None = None
) -> Operands:
    """The mask's arrays in argument order, as `row_wise_operands` explains them.

    work int32 (CTAs, 8), columns int32 (tiles, 16), keep_bits uint32 (masked tiles, 1, 32, 1); the workspace partials
    float32 (slots, rows, v_head_dim + 8), arrivals uint32 (units,).

    UnsupportedError for a problem with positions, whose lists `plan` computes.
    """
    if problem.has_positions:
        raise UnsupportedError("the row-wise kernel's lists depend on positions: plan() computes them")
    if mask is None:
        mask = MaskForms(problem).stored((config.block_m, config.block_n))
    *lists, partials, arrivals = row_wise_operands(mask, problem, gpu_of(target))
    return Operands.of(lists, (partials, arrivals), unwritten=len(partials) == 1)


def plan(problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask) -> Plan:
    """The functions that compute work, columns and keep_bits from positions, as `row_plan` explains them."""
    return row_plan(problem, mask, gpu_of(target))


def instantiate(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments q, k, v, [bias], [sink], work, columns, keep_bits, partials, arrivals, out, [lse]."""
    g = RowWiseGeometry(problem, config)
    warps, ahead, stage_bytes = config.warps, config.stages - 1, g.warp.stage_bytes
    k_tile = g.warp.k_tile
    copy_q = tile_copy(g.q_tile, problem.head_dim, g.rows, g.rows % MMA_ROWS != 0)
    gather = token_gather(g)
    products = matrix_products(g.warp)
    softmax = softmax_functions(g.warp)
    bias_of = score_bias(g)
    natural = softmax.to_natural is not None  # scores are scaled and capped before the softmax, not within it
    results = partial_results(g, LOG2E * softmax.natural_scale)
    store_out = output_store(g)
    record_rows, record_pitch = g.record_shape
    row_vectors = problem.v_head_dim // VECTOR
    q_words = 4 * (g.warp.query_steps if g.warp.q_in_registers else 1)

    def rows_of(buffer, operand, b, kv_head):
        """Global address of (token, element) of one key/value head; indices are 64-bit if a large cache needs it."""
        b = T.cast(b, "int64") if _elements(problem, operand) > MAX_INT32 else b
        return lambda token, element: buffer.ptr_to([*problem.index(operand, b, kv_head, token, element)])

    def queries_of(buffer, operand, b, kv_head):
        """Global address of (row, element) of the query heads that share a key/value head."""

        def pointer(row, element):
            head = kv_head * problem.group + row // problem.q_len
            return buffer.ptr_to([*problem.index(operand, b, head, row % problem.q_len, element)])

        return pointer

    @T.inline
    def commit():
        T.ptx["cp.async.commit_group"]()

    @T.inline
    def wait(pending):
        """Wait until at most the `pending` latest copy groups of this thread are under way."""
        T.ptx["cp.async.wait_group"](pending)

    @T.jit(private=True)
    def kernel(
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        bias_handle: T.Optional(T.handle),
        sink_handle: T.Optional(T.handle),
        work_handle: T.handle,
        columns_handle: T.handle,
        keep_handle: T.handle,
        partials_handle: T.handle,
        arrivals_handle: T.handle,
        out_handle: T.handle,
        lse_handle: T.Optional(T.handle),
    ):
        n_work = T.int32()
        n_tiles = T.int32()
        n_masked = T.int32()
        n_slots = T.int32()
        q = T.match_buffer(q_handle, problem.shape("q"), problem.dtype, align=16)
        k = T.match_buffer(k_handle, problem.shape("k"), problem.dtype, align=16)
        v = T.match_buffer(v_handle, problem.shape("v"), problem.dtype, align=16)
        bias = T.meta_var(match_optional("bias", bias_handle, problem.bias_shape, problem.bias_dtype))
        sink = T.meta_var(match_optional("sink", sink_handle, (problem.q_heads,), problem.sink_dtype))
        work = T.match_buffer(work_handle, (n_work, 8), "int32", align=16)
        columns = T.match_buffer(columns_handle, (n_tiles, TOKENS), "int32", align=16)
        keep_bits = T.match_buffer(keep_handle, (n_masked, 1, 32, g.warp.keep_words), "uint32")
        partials = T.match_buffer(partials_handle, (n_slots, record_rows, record_pitch), "float32", align=16)
        arrivals = T.match_buffer(arrivals_handle, (g.n_units,), "uint32")
        out = T.match_buffer(out_handle, problem.shape("out"), problem.dtype, align=16)
        lse = T.meta_var(match_optional("lse", lse_handle, problem.lse_shape, "float32"))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([n_work])
        thread = T.thread_id([g.threads])
        warp = T.warp_id([warps])
        lane = T.lane_id([32])
        item = T.alloc_local([8], "int32")
        for i in T.unroll(8):
            item[i] = work[cta, i]
        begin = T.meta_var(item[1])
        end = T.meta_var(item[2])
        first_part = T.meta_var(item[3])
        keep_offset = T.meta_var(item[4])
        first_slot = T.meta_var(item[5])
        splits = T.meta_var(item[6])
        slot = T.meta_var(item[7])
        first_row = T.meta_var(item[0] % g.n_row_tiles * MMA_ROWS)
        b = T.meta_var(item[0] // g.n_row_tiles // problem.kv_heads)
        kv_head = T.meta_var(item[0] // g.n_row_tiles % problem.kv_heads)

        base = T.meta_var(shared_memory(g.shared_bytes, align=128))
        stage0 = base + g.q_tile.size + warp * g.warp_bytes
        k_rows = T.meta_var(rows_of(k, "k", b, kv_head))
        v_rows = T.meta_var(rows_of(v, "v", b, kv_head))
        out_rows = T.meta_var(queries_of(out, "out", b, kv_head))

        scores = T.alloc_local([4 * g.warp.score_tiles], "float32")
        bias_values = T.alloc_local([4 * g.warp.score_tiles], "float32")
        acc = T.alloc_local([4 * g.warp.value_tiles], "float32")
        row_max = T.alloc_local([2], "float32")
        row_sum = T.alloc_local([2], "float32")
        q_fragments = T.alloc_local([q_words], "uint32")
        keep = T.alloc_local([g.warp.keep_words], "uint32")
        next_keep = T.alloc_local([g.warp.keep_words], "uint32")
        column = T.alloc_local([1], "int32")  # token position in the tile whose copy starts next
        read_at = T.alloc_local([1], "int32")  # offset of the stage of the tile that is computed, in bytes

        # The first copy group is the queries; each further group is one tile of tokens.
        copy_q(base, thread, queries_of(q, "q", b, kv_head), first_row)
        commit()
        for i in T.unroll(ahead):
            column[0] = columns[T.max(T.min(begin + warp + i * warps, end - 1), 0), lane % TOKENS]
            gather(stage0 + i * stage_bytes, lane, column, begin + warp + i * warps < end, k_rows, v_rows)
            commit()
        column[0] = columns[T.max(T.min(begin + warp + ahead * warps, end - 1), 0), lane % TOKENS]
        keep[0] = T.uint32(0)
        if T.And(first_part <= begin + warp, begin + warp < end):
            softmax.load_keep(keep, keep_bits, begin + warp + keep_offset, 0, lane)
        for i in T.unroll(2):
            row_max[i] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            row_sum[i] = T.float32(0)
        for i in T.unroll(4 * g.warp.value_tiles):
            acc[i] = T.float32(0)
        q_lane = products.q_address(base, 0, lane)
        k_lane = products.k_address(stage0, lane)
        v_lane = products.v_address(stage0 + k_tile.size, lane)
        wait(ahead)
        T.cuda.cta_sync()
        if g.warp.q_in_registers:
            products.load_all_q(q_fragments, q_lane)

        read_at[0] = 0
        for i in T.serial((end - begin - warp + (warps - 1)) // warps):
            p = T.meta_var(begin + warp + i * warps)
            if problem.bias_shape is not None:
                bias_of.load(bias_values, bias, columns, p, b, kv_head, first_row, lane)
            wait(ahead - 1)
            T.cuda.warp_sync()
            write_at = T.meta_var(T.Select(read_at[0] == 0, ahead * stage_bytes, read_at[0] - stage_bytes))
            gather(stage0 + write_at, lane, column, p + ahead * warps < end, k_rows, v_rows)
            commit()
            # Lists and keep bits are read a whole tile before their use.
            column[0] = columns[T.min(p + (ahead + 1) * warps, end - 1), lane % TOKENS]
            if T.And(first_part <= p + warps, p + warps < end):
                softmax.load_keep(next_keep, keep_bits, p + warps + keep_offset, 0, lane)
            products.multiply_qk(scores, q_fragments, q_lane, k_lane + read_at[0])
            if problem.bias_shape is not None:
                bias_of.apply(scores, bias_values)
            elif natural:
                for j in T.unroll(4 * g.warp.score_tiles):
                    scores[j] = before_bias(problem, scores[j])
            if first_part <= p:
                softmax.mask(scores, keep)
            softmax.update(scores, acc, row_max, row_sum)
            products.multiply_pv(acc, scores, v_lane + read_at[0])
            keep[0] = next_keep[0]
            read_at[0] = T.Select(read_at[0] == ahead * stage_bytes, 0, read_at[0] + stage_bytes)

        T.cuda.warp_sync()
        results.write_record(stage0, lane, acc, row_max, row_sum)
        T.cuda.cta_sync()

        @T.inline
        def load_of_warp(words, i, record, row, element):
            T.ptx["ld.shared.v4.f32"](
                words[i], words[i + 1], words[i + 2], words[i + 3],
                address(base + g.q_tile.size + record * g.warp_bytes + (row * record_pitch + element) * 4),
            )  # fmt: skip

        @T.inline
        def load_of_split(words, i, record, row, element):
            # Through L2: other multiprocessors wrote it.
            T.ptx["ld.global.cg.v4.f32"](
                words[i], words[i + 1], words[i + 2], words[i + 3],
                partials.ptr_to([first_slot + record, row, element]),
            )  # fmt: skip

        merge_warps = T.meta_var(results.merge_function(load_of_warp, warps))
        merge_splits = T.meta_var(results.merge_function(load_of_split, AT_ONCE))
        merged = T.alloc_local([6], "float32")
        n_vectors = T.meta_var(T.min(g.rows - first_row, record_rows) * row_vectors)
        for i in T.serial(-(-record_rows * row_vectors // g.threads)):
            vector = T.meta_var(i * g.threads + thread)
            row = T.meta_var(vector // row_vectors)
            element = T.meta_var(vector % row_vectors * VECTOR)
            if vector < n_vectors:
                merge_warps(merged, warps, row, element)
                if splits == 1:
                    if problem.sink_dtype is not None:
                        results.add_sink(merged, sink, kv_head, first_row + row)
                    store_out(merged, out_rows(first_row + row, element))
                    if problem.gives_lse:
                        if element == 0:
                            results.store_lse(lse, merged, b, kv_head, first_row + row)
                else:
                    T.ptx["st.global.v4.f32"](
                        partials.ptr_to([slot, row, element]), merged[0], merged[1], merged[2], merged[3]
                    )
                    if element == 0:
                        T.ptx["st.global.v2.f32"](partials.ptr_to([slot, row, g.warp.v_head_dim]), merged[4], merged[5])
        if splits > 1:
            arrived = T.alloc_local([1], "uint32")
            count = T.meta_var(lambda before: before)
            flag = T.meta_var(base + g.arrival_offset)
            arrive(arrived, arrivals.ptr_to([item[0]]), T.cast(splits - 1, "uint32"), count, thread, flag)
            if T.cast(arrived[0], "int32") == splits - 1:
                for i in T.serial(-(-record_rows * row_vectors // g.threads)):
                    vector = T.meta_var(i * g.threads + thread)
                    row = T.meta_var(vector // row_vectors)
                    element = T.meta_var(vector % row_vectors * VECTOR)
                    if vector < n_vectors:
                        merge_splits(merged, splits, row, element)
                        if problem.sink_dtype is not None:
                            results.add_sink(merged, sink, kv_head, first_row + row)
                        store_out(merged, out_rows(first_row + row, element))
                        if problem.gives_lse:
                            if element == 0:
                                results.store_lse(lse, merged, b, kv_head, first_row + row)

    optional = {"bias_handle": problem.bias_shape, "sink_handle": problem.sink_dtype, "lse_handle": problem.gives_lse}
    absent = [name for name, given in optional.items() if not given]
    return finished(kernel, f"row_wise_attention_{config.warps}x{config.stages}", absent)
