"""Block-wise sparse attention on CUDA (sm_80 and up): the paper's Algorithm 1 on tensor cores, mma.sync or wgmma.

A CTA owns `block_m` query rows of one head and walks only the blocks that the mask lists for them.  K and V tiles
arrive in swizzled shared memory by cp.async while the tensor cores work on the tiles before them.  The scores never
leave registers.  Partial blocks have their keep bits applied; full blocks run no masking code.  Block rows that are
much longer than the rest (global tokens) are split among CTAs, and the CTA that finishes last merges them (split-KV).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels.attention.block_maps.order import Share
from tir_kernels.attention.block_maps.plan import Reader, block_map_plan, divides, with_count
from tir_kernels.attention.block_wise import cost
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry, partial_shape, unaligned
from tir_kernels.attention.block_wise.operands import block_wise_operands, block_wise_workspace, keep_bits_of
from tir_kernels.attention.block_wise.parts import part_functions
from tir_kernels.attention.block_wise.softmax import NEGATIVE_INFINITY, softmax_functions
from tir_kernels.attention.block_wise.split_kv import split_functions
from tir_kernels.attention.block_wise.walk import Listed, begin_walk, walk_functions
from tir_kernels.attention.block_wise.wgmma import warpgroup_products
from tir_kernels.attention.block_wise.work import Item, ctas_at_once, fields_of
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.products import matrix_products, output_store
from tir_kernels.attention.sink import sink_functions
from tir_kernels.attention.template import WITH_POSITIONS, Plan
from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of, has_wgmma
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import PANEL
from tir_kernels.cuda.tile import tile_copy
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

NAME = "block-wise"
TARGET_KIND = "cuda"
TAKES_TOKEN_STRIDES = True
Config = BlockWiseConfig

# (block_m, warps): 16 or 32 query rows a warp.
ROWS_AND_WARPS = ((64, 4), (64, 2), (128, 8), (128, 4), (16, 1), (32, 2), (32, 1))
WARPGROUP_ROWS_AND_WARPS = ((64, 4), (128, 8))


def unsupported(problem: AttentionProblem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if problem.has_positions:
        return WITH_POSITIONS
    reason = unaligned(problem)
    if reason is not None:
        return reason
    for operand in ("q", "k", "v", "out"):
        if np.prod(problem.shape(operand), dtype=np.int64) >= 2**31:
            return f"{operand} of shape {problem.shape(operand)} has 2^31 elements or more; indices are 32-bit"
    if problem.bias_shape is not None and np.prod(problem.bias_shape, dtype=np.int64) >= 2**31:
        return f"bias of shape {problem.bias_shape} has 2^31 elements or more; indices are 32-bit"
    if not _legal(problem, target):
        return f"no configuration fits the shared memory of {target.attrs['arch']}"
    return None


def configs(problem: AttentionProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory; the default first."""
    legal = _legal(problem, target)
    # Fastest on an H200 for window, Longformer and BigBird masks from 2048 tokens on.
    block_n = 32 if max(problem.head_dim, problem.v_head_dim) <= 64 else 64
    return sorted(
        legal, key=lambda c: (c.warpgroup, c.block_m != 64, c.block_n != block_n, abs(c.stages - 2), c.warps != 4)
    )


@functools.lru_cache(maxsize=64)
def _legal(problem, target):
    limit = int(target.attrs["max_shared_memory_per_block"])
    is_float32 = problem.dtype == "float32"
    candidates = [
        Config(block_m, block_n, warps, stages)
        for block_m, warps in ROWS_AND_WARPS
        for block_n in ((32, 64) if is_float32 else (32, 64, 128))
        for stages in (1, 2, 3)
    ]
    if (
        has_wgmma(target)
        and problem.dtype != "float32"
        and problem.head_dim % PANEL == 0
        and problem.v_head_dim % PANEL == 0
    ):
        candidates += [
            Config(block_m, block_n, warps, stages, warpgroup=True)
            for block_m, warps in WARPGROUP_ROWS_AND_WARPS
            for block_n in (32, 64, 128)
            for stages in (1, 2, 3)
        ]
    geometries = (Geometry(problem, c) for c in candidates if divides(problem.block_map, c.block_m, c.block_n))
    return [g.config for g in geometries if g.ctas_per_multiprocessor and g.shared_bytes <= limit]


def worth_predicting(configs: Sequence[Config]) -> list[Config]:
    """The configurations with two stages and the tiles that `cost.py` lists."""
    return cost.shortlist(list(configs))


def worth_measuring(configs: Sequence[Config]) -> list[Config]:
    """The configurations with the tiles that `cost.py` lists and any number of stages."""
    return [config for config in configs if cost.is_candidate(config)] or list(configs[:1])


def predict_us(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, forms: MaskForms | None = None
) -> float:
    """Predicted microseconds of the kernel for a mask whose tokens are in the configuration's order."""
    fine = (forms or MaskForms(problem, None, config.token_stride)).fine
    return cost.predict_us(problem, config, fine, gpu_of(target))


def operands(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask | None = None
) -> Operands:
    """The mask's arrays in argument order, as `block_wise_operands` explains them.

    work int32 (CTAs, 8), entries int32 (listed blocks + 4, 2), keep_bits uint32 (part blocks, block_m / 16, 32, words);
    the workspace partials float32 (slots, n8 tiles of v + 1, 2 * block_m, 4), arrivals uint32 (slots,).
    With a block map, whose lists `plan` computes, these are the lists of all that the mask keeps.
    """
    if mask is None:
        mask = MaskForms(problem, None, config.token_stride).stored((config.block_m, config.block_n))
    work, *lists, partials, arrivals = block_wise_operands(mask, problem, gpu_of(target))
    work = work if problem.block_map is None else with_count(work)
    return Operands.of((work, *lists), (partials, arrivals), unwritten=len(partials) == 1)


def _fields_of_share(share: Share) -> dict[int, Any]:
    return fields_of(share, share.first_key)


def reader(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> Reader:
    """How the kernel reads lists that are written at run time."""
    return Reader(
        False,
        _fields_of_share,
        Item.SPLITS,
        ctas_at_once(config.block_m, gpu_of(target)),
        lambda slots: block_wise_workspace(problem, config.block_m, slots),
    )


def plan(problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask) -> Plan:
    """The functions that compute work and entries from a block map, as `block_map_plan` explains them."""
    return block_map_plan(problem, mask, gpu_of(target), reader(problem, config, target), keep_bits_of(mask))


def instantiate(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments q, k, v, [bias], [key_count], [sink], [prior, prior_lse], the operands, out, [lse].

    The mask must be compiled for the block size and the token stride of the configuration.
    """
    g = Geometry(problem, config)
    copy_q = tile_copy(g.q_tile, problem.head_dim, problem.q_len, g.ragged_q, config.token_stride)
    products = (warpgroup_products if config.warpgroup else matrix_products)(g)
    softmax = softmax_functions(g)
    split = split_functions(g, softmax)
    parts = part_functions(g, softmax)
    sinks = sink_functions(g, softmax.natural_scale)
    blocks = walk_functions(g, softmax)
    store_out = output_store(g)
    q_heads, group = problem.q_heads, problem.group
    q_words = 4 * g.row_tiles * (g.query_steps if g.q_in_registers else 1)
    warp_span = 16 * g.row_tiles * config.token_stride  # tokens from one warp's first row to the next one's

    def rows_of(buffer, operand, b, h):
        """Global address of (row, element) of one head's matrix."""
        return lambda row, element: buffer.ptr_to([*problem.index(operand, b, h, row, element)])

    @T.jit(private=True)
    def kernel(
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        bias_handle: T.Optional(T.handle),
        key_count_handle: T.Optional(T.handle),
        sink_handle: T.Optional(T.handle),
        prior_handle: T.Optional(T.handle),
        prior_lse_handle: T.Optional(T.handle),
        work_handle: T.handle,
        entries_handle: T.handle,
        keep_handle: T.handle,
        partials_handle: T.handle,
        arrivals_handle: T.handle,
        out_handle: T.handle,
        lse_handle: T.Optional(T.handle),
    ):
        n_work = T.int32()
        n_entries = T.int32()
        n_part = T.int32()
        n_slots = T.int32()
        # q (B, Hq, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv) and out (B, Hq, Sq, Dv) in the problem's layouts
        q = T.match_buffer(q_handle, problem.shape("q"), problem.dtype, align=16)
        k = T.match_buffer(k_handle, problem.shape("k"), problem.dtype, align=16)
        v = T.match_buffer(v_handle, problem.shape("v"), problem.dtype, align=16)
        # A bias broadcasts to (B, Hq, Sq, Skv).
        bias = T.meta_var(match_optional("bias", bias_handle, problem.bias_shape, problem.bias_dtype))
        key_count = T.meta_var(match_optional("key_count", key_count_handle, (problem.key_counts,), "int32"))
        sink = T.meta_var(match_optional("sink", sink_handle, (q_heads,), problem.sink_dtype))
        prior = T.meta_var(match_optional("prior", prior_handle, problem.shape("out"), problem.dtype))
        prior_lse = T.meta_var(match_optional("prior_lse", prior_lse_handle, problem.lse_shape, "float32"))
        # operands.py describes these: what each CTA does; (first token, partial block or -1) of each listed block; keep
        # bits of partial blocks; the workspace of block rows that are split.
        work = T.match_buffer(work_handle, (n_work, len(Item)), "int32", align=16)
        entries = T.match_buffer(entries_handle, (n_entries, 2), "int32", align=8)
        keep_bits = T.match_buffer(keep_handle, (n_part, config.block_m // 16, 32, g.keep_words), "uint32", align=8)
        partials = T.match_buffer(
            partials_handle, (n_slots, *partial_shape(problem, config.block_m)), "float32", align=16
        )
        arrivals = T.match_buffer(arrivals_handle, (n_slots,), "uint32")
        out = T.match_buffer(out_handle, problem.shape("out"), problem.dtype, align=16)
        lse = T.meta_var(match_optional("lse", lse_handle, problem.lse_shape, "float32"))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([n_work])
        thread = T.thread_id([g.threads])
        warp = T.meta_var(thread // 32)
        lane = T.meta_var(thread % 32)

        # The CTA's block row, and its blocks.
        item = T.alloc_local([len(Item)], "int32")
        for i in T.unroll(len(Item)):
            item[i] = work[cta, i]
        if problem.block_map is not None:
            if item[Item.SPLITS] == 0:  # the map keeps less than would be work for all CTAs
                T.evaluate(T.thread_return())
        begin = item[Item.BEGIN]
        end = item[Item.END]
        b = item[Item.HEAD] // q_heads
        h = item[Item.HEAD] % q_heads
        first_row = item[Item.FIRST_ROW]

        if problem.has_key_count:
            limit = T.alloc_local([1], "int32")
            limit[0] = key_count[problem.key_count_index(b)]
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024 if config.warpgroup else 128))
        stage0 = base + g.kv_offset
        q_rows = T.meta_var(rows_of(q, "q", b, h))
        k_rows = T.meta_var(rows_of(k, "k", b, h // group))
        v_rows = T.meta_var(rows_of(v, "v", b, h // group))

        # For this warp's rows: fragments of 16 x 8 scores and outputs, 4 elements a lane; maxima and sums of 2 rows in
        # each lane and row tile.
        scores = T.alloc_local([g.row_tiles * g.score_tiles * 4], "float32")
        acc = T.alloc_local([g.row_tiles * g.value_tiles * 4], "float32")
        row_max = T.alloc_local([g.row_tiles * 2], "float32")
        row_sum = T.alloc_local([g.row_tiles * 2], "float32")
        q_fragments = T.alloc_local([q_words], "uint32")
        walk = T.meta_var(
            begin_walk(g, Listed(entries, keep_bits, begin, end, k_rows, v_rows, thread, warp, lane, stage0))
        )

        # Values that only the end needs are kept in shared memory: registers limit the CTAs on a multiprocessor.
        place = T.alloc_local([4], "uint32")
        last = T.alloc_local([1], "uint32")
        if thread == 0:
            T.ptx["st.shared.v4.b32"](
                address(base + g.saved_offset),
                address(item[Item.HEAD]),
                address(item[Item.FIRST_ROW]),
                address(item[Item.SPLITS]),
                address(item[Item.FIRST_SLOT]),
            )
            T.ptx["st.shared.b32"](address(base + (g.saved_offset + 16)), address(item[Item.SLOT]))
            if problem.sink_dtype is not None:
                T.ptx["st.shared.f32"](address(base + (g.saved_offset + 20)), T.cast(sink[h], "float32"))
        copy_q(base, thread, q_rows, first_row)
        blocks.commit()
        blocks.start(walk, item[Item.FIRST_KEY])

        # While the copies are under way, the sums are set to zero, or to the prior part's result.
        for i in T.unroll(g.row_tiles * 2):
            row_max[i] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            row_sum[i] = T.float32(0)
        for i in T.unroll(g.row_tiles * g.value_tiles * 4):
            acc[i] = T.float32(0)
        blocks.load_first_keep(walk)
        if problem.continues:
            if item[Item.SLOT] == item[Item.FIRST_SLOT]:  # the first CTA of a block row
                parts.load_prior(prior, prior_lse, b, h, first_row + warp * warp_span, lane, acc, row_max, row_sum)
        q_lane = products.q_address(base, warp, lane)
        k_lane = products.k_address(stage0, lane)
        v_lane = products.v_address(stage0 + g.k_tile.size, lane)
        blocks.await_first(walk)
        if g.q_in_registers:
            products.load_all_q(q_fragments, q_lane)

        # The blocks: S = Q Kᵀ, P = exp(S - max), O = O exp(old max - max) + P V.
        walk.read_at[0] = 0
        for p in T.serial(begin, end):
            blocks.arrive(walk, p)
            blocks.find_active(walk)
            if problem.has_key_count:
                if walk.key[0] >= limit[0]:
                    walk.active[0] = T.uint32(0)
            if walk.active[0] != 0:
                products.multiply_qk(scores, q_fragments, q_lane, k_lane + walk.read_at[0])
            blocks.look_ahead(walk, p)
            if walk.active[0] != 0:
                if softmax.to_natural is not None:
                    softmax.to_natural(scores, bias, b, h, first_row + warp * warp_span, walk.key[0], lane)
                if walk.part[0] >= 0:
                    softmax.mask(scores, walk.keep)
                if problem.has_key_count:
                    softmax.mask_from(limit[0], scores, walk.key[0], lane)
                softmax.update(scores, acc, row_max, row_sum)
                products.multiply_pv(acc, scores, v_lane + walk.read_at[0])
            blocks.step(walk, p)

        # The end: the last of the CTAs that share a block row adds up all results, normalizes and stores.
        T.ptx["ld.shared.v4.b32"](place[0], place[1], place[2], place[3], address(base + g.saved_offset))
        splits = T.meta_var(T.cast(place[2], "int32"))
        first_slot = T.meta_var(T.cast(place[3], "int32"))
        last[0] = T.uint32(1)
        if splits > 1:
            T.ptx["ld.shared.b32"](last[0], address(base + (g.saved_offset + 16)))
            split.write(partials, T.cast(last[0], "int32"), thread, acc, row_max, row_sum)
            split.arrive(last, arrivals.ptr_to([first_slot]), splits, thread, base + g.saved_offset)
            if last[0] != T.uint32(0):
                split.merge(partials, first_slot, splits, thread, acc, row_max, row_sum)
        if last[0] != T.uint32(0):
            head = T.meta_var(T.cast(place[0], "int32"))
            warp_row = T.meta_var(T.cast(place[1], "int32") + warp * warp_span)
            if problem.sink_dtype is not None:
                logit = T.alloc_local([1], "float32")
                T.ptx["ld.shared.f32"](logit[0], address(base + (g.saved_offset + 20)))
                sinks.add(logit[0], lane, acc, row_max, row_sum)
            softmax.normalize(acc, row_sum)
            if config.warpgroup:  # other warps' queries lie where this one's output goes
                T.cuda.cta_sync()
            store_out(
                acc,
                base + warp * g.out_tile.size,
                lane,
                rows_of(out, "out", head // q_heads, head % q_heads),
                warp_row,
            )
            if problem.gives_lse:
                parts.store_lse(lse, head // q_heads, head % q_heads, warp_row, lane, row_max, row_sum)

    optional = {"bias_handle": problem.bias_shape, "sink_handle": problem.sink_dtype, "prior_handle": problem.continues}
    optional |= {"key_count_handle": problem.has_key_count}
    optional |= {"prior_lse_handle": problem.continues, "lse_handle": problem.gives_lse}
    absent = [name for name, given in optional.items() if not given]
    return finished(
        kernel, f"block_wise_attention_{config.block_m}x{config.block_n}x{config.warps}x{config.stages}", absent
    )
