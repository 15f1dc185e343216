"""Warp-specialized sparse attention on Hopper (sm_90a): one thread copies blocks, one to three warpgroups compute.

As many CTAs as run at once take items from a list, longest block rows first.  In each CTA one thread of a separate
warpgroup (producer.py) sends the queries of an item and the K and V tiles of its listed blocks by the tensor memory
accelerator; the others (consumer.py) multiply and run the softmax.  They wait for tiles, not for each other (rings.py).
Items, lists and keep bits are read on the device when the kernel runs.
"""

import functools
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.attention.block_maps.order import Share
from tir_kernels.attention.block_maps.plan import Reader, block_map_plan, divides, with_count
from tir_kernels.attention.block_wise.geometry import partial_shape, unaligned
from tir_kernels.attention.block_wise.parts import part_functions
from tir_kernels.attention.block_wise.softmax import softmax_functions
from tir_kernels.attention.block_wise.split_kv import split_functions
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.products import output_store
from tir_kernels.attention.sink import sink_functions
from tir_kernels.attention.template import WITH_POSITIONS, Plan, all_of_them
from tir_kernels.attention.warp_specialized import cost
from tir_kernels.attention.warp_specialized.consumer import consumer_functions
from tir_kernels.attention.warp_specialized.geometry import (
    ITEM_BYTES,
    PRODUCER_REGISTERS,
    WARPGROUP,
    WORD_BYTES,
    Geometry,
    WarpSpecializedConfig,
)
from tir_kernels.attention.warp_specialized.operands import (
    keep_bits_of,
    warp_specialized_operands,
    warp_specialized_workspace,
)
from tir_kernels.attention.warp_specialized.producer import producer_functions, strides, tensor_maps
from tir_kernels.attention.warp_specialized.rings import ring_functions, rings_of
from tir_kernels.attention.warp_specialized.work import Item, fields_of
from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import gpu_of, has_wgmma
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, prefetch_maps, shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.wgmma import uniform_warp
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.template import Operands

NAME = "warp-specialized"
TARGET_KIND = "cuda"
TAKES_TOKEN_STRIDES = True
TILE_N = 128  # keys of a tile of several blocks
Config = WarpSpecializedConfig
OUTPUT_BARRIER = 4  # number of the barrier among the threads of all warpgroups that compute
FIRST_BARRIER = 1  # number of the barrier among the threads of the first warpgroup; 0 is the CTA's


def unsupported(problem: AttentionProblem, target: tvm.target.Target) -> str | None:
    """Why this kernel cannot compute `problem`, or None."""
    if problem.has_positions:
        return WITH_POSITIONS
    if not has_wgmma(target):
        return f"its instructions are sm_90a's, the target is {target.attrs['arch']}"
    if problem.dtype not in ("float16", "bfloat16"):
        return f"tensor cores need float16 or bfloat16 inputs, got {problem.dtype}"
    reason = unaligned(problem)
    if reason is not None:
        return reason
    for operand in "qkv":
        if not strides(problem, operand)[2] and problem.logical_shape(operand)[2] > 1:
            return f"{operand} repeats one token"
    for operand in ("q", "k", "v", "out"):
        if np.prod(problem.shape(operand), dtype=np.int64) >= 2**31:
            return f"{operand} of shape {problem.shape(operand)} has 2^31 elements or more; indices are 32-bit"
    if problem.bias_shape is not None and math.prod(problem.bias_shape) >= 2**31:
        return f"bias of shape {problem.bias_shape} has 2^31 elements or more; indices are 32-bit"
    if not _legal(problem):
        narrowest = min(config.block_n for config in _candidates(problem))
        if not divides(problem.block_map, 64, narrowest):
            return f"its blocks of 64x{narrowest} do not divide those of {problem.block_map}"
        return "no configuration fits the registers and the shared memory of a multiprocessor"
    return None


def configs(problem: AttentionProblem, target: tvm.target.Target) -> list[Config]:
    """Every configuration that fits registers and shared memory; the default first."""
    return list(_legal(problem))


@functools.lru_cache(maxsize=64)
def _legal(problem):
    able = [c for c in _candidates(problem) if divides(problem.block_map, c.block_m, c.block_n)]
    return [c for c in able if Geometry(problem, c).ctas_per_multiprocessor]


def _candidates(problem: AttentionProblem) -> list[Config]:
    """Tiles of one block, and with a block map, whose blocks may be narrow, of several.

    A bias, and the limit that a key count is, are looked up by a tile's first key: its blocks have to be neighbours.
    """
    tiles = ((128, 128), (128, 64), (192, 128), (64, 128), (64, 64))
    found = [Config(m, n, stages) for stages in (2, 3) for m, n in tiles]
    if problem.block_map is not None and problem.bias_shape is None and not problem.has_key_count:
        # With 64 rows, two blocks of 64 are slower together than one by one (15 % on an H200).
        found += [Config(m, n, 2, TILE_N // n) for m, n in ((128, 64), (128, 32), (64, 32))]
    return found


worth_measuring = all_of_them


def worth_predicting(configs: Sequence[Config]) -> list[Config]:
    """The configurations with two stages: a third one is no faster anywhere on an H200."""
    return [config for config in configs if config.stages == 2] or list(configs[:1])


def predict_us(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, forms: MaskForms | None = None
) -> float:
    """Predicted microseconds of the kernel for a mask."""
    fine = (forms or MaskForms(problem, None, config.token_stride)).fine
    return cost.predict_us(problem, config, fine, gpu_of(target))


def operands(
    problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask | None = None
) -> Operands:
    """The mask's arrays in argument order, as `warp_specialized_operands` explains them.

    With a block map, whose lists `plan` computes, these are the lists of all that the mask keeps.
    """
    if mask is None:
        mask = MaskForms(problem, None, config.token_stride).stored((config.block_m, config.block_n))
    gpu = gpu_of(target)
    g = Geometry(problem, config)
    ctas = g.grid_size(gpu)
    (items, *lists), workspace = warp_specialized_operands(mask, problem, gpu, ctas, config.together, g.leading_rows)
    # Where each CTA has one item at most, none counts.
    unwritten = len(workspace[0]) == 1 and len(items) <= ctas
    items = items if problem.block_map is None else with_count(items)
    return Operands.of((items, *lists), workspace, unwritten=unwritten)


def _fields_of_share(share: Share) -> dict[int, Any]:
    return fields_of(share, share.full)


def reader(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> Reader:
    """How the kernel reads lists that are written at run time."""
    return Reader(
        True,
        _fields_of_share,
        Item.SPLITS,
        Geometry(problem, config).grid_size(gpu_of(target)),
        lambda slots: warp_specialized_workspace(problem, config.block_m, slots),
        config.together,
    )


def plan(problem: AttentionProblem, config: Config, target: tvm.target.Target, mask: BlockSparseMask) -> Plan:
    """The functions that compute items and entries from a block map, as `block_map_plan` explains them."""
    return block_map_plan(
        problem, mask, gpu_of(target), reader(problem, config, target), keep_bits_of(mask, config.together)
    )


def instantiate(problem: AttentionProblem, config: Config, target: tvm.target.Target) -> tvm.tirx.PrimFunc:
    """The kernel; arguments q, k, v, [bias], [key_count], [sink], [prior, prior_lse], the operands, out, [lse]."""
    g = Geometry(problem, config)
    grid = g.grid_size(gpu_of(target))
    softmax = softmax_functions(g)
    split = split_functions(g, softmax)
    parts = part_functions(g, softmax)
    sinks = sink_functions(g, softmax.natural_scale)
    rings = rings_of(g)
    ring = ring_functions(g, rings)
    producer = producer_functions(g, rings, ring)
    consumer = consumer_functions(g, rings, ring, softmax)
    store_out = output_store(g)
    q_heads = problem.q_heads
    ahead = g.q_stages > 1  # whether the next item is received before this one's output is stored

    def rows_of(buffer, operand, b, h):
        """Global address of (row, element) of one head's matrix."""
        return lambda row, element: buffer.ptr_to([*problem.index(operand, b, h, row, element)])

    @T.inline
    def take(taken, n_items, to):
        """Take the next item; the counter wraps to 0 when every CTA has found the list empty.

        Where there is one for each CTA, none has to wait for the counter to say so.
        """
        to[0] = T.cast(n_items, "uint32")
        if n_items > grid:
            T.ptx["atom.relaxed.gpu.global.inc.u32"](to[0], taken.ptr_to([0]), T.cast(n_items - 1, "uint32"))

    @T.inline
    def natural_scores(s, bias, b, h, first_row, entries, entry, lane):
        if softmax.to_natural is not None:
            softmax.to_natural(s, bias, b, h, first_row, entries[entry, 0], lane)

    @T.inline
    def find_key(keys, entries, entry):
        """keys[0] = the first token of a listed block, read well before its use."""
        if problem.has_key_count:
            keys[0] = entries[entry, 0]

    @T.inline
    def drop_keys(s, keys, lane):
        """Mask the keys from the limit keys[1] on."""
        if problem.has_key_count:
            softmax.mask_from(keys[1], s, keys[0], lane)

    @T.inline
    def load_fields(fields, base, t, first):
        """Load four fields of item t from shared memory, where they are until its queries are released."""
        T.ptx["ld.shared.v4.b32"](
            fields[0], fields[1], fields[2], fields[3],
            address(base + (g.item_offset + first * WORD_BYTES) + rings.q.stage(t) * ITEM_BYTES),
        )  # fmt: skip

    @T.inline
    def receive(s, fields, base, warpgroup, t, c):
        """Wait for item t, and start its first scores; after the last item, fields[Item.HEAD] is -1."""
        ring.await_arrived(rings.q, base, t)
        load_fields(fields, base, t, 0)
        if fields[Item.HEAD] >= 0:
            ring.await_arrived(rings.k, base, c)
        # Without an item these are scores of what lies there.  A product that is only started sometimes would be waited
        # for at once, as the compiler has it.
        consumer.start_scores(s, base, warpgroup, t, c)
        consumer.commit()

    @T.inline
    def sync_warpgroup(warpgroup):
        T.ptx["bar.sync"](T.cast(FIRST_BARRIER + warpgroup, "uint32"), T.uint32(WARPGROUP))

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
        items_handle: T.handle,
        entries_handle: T.handle,
        keep_handle: T.handle,
        partials_handle: T.handle,
        arrivals_handle: T.handle,
        taken_handle: T.handle,
        out_handle: T.handle,
        lse_handle: T.Optional(T.handle),
    ):
        n_items = T.int32()
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
        # operands.py describes these.  With a block map, the last row of items has their number.
        items = T.match_buffer(items_handle, (n_items, len(Item)), "int32", align=16)
        entries = T.match_buffer(entries_handle, (n_entries, 2), "int32", align=8)
        keep_bits = T.match_buffer(keep_handle, (n_part, config.block_m // 16, 32, g.block_words), "uint32", align=16)
        partials = T.match_buffer(
            partials_handle, (n_slots, *partial_shape(problem, config.block_m)), "float32", align=16
        )
        arrivals = T.match_buffer(arrivals_handle, (n_slots, g.warpgroups), "uint32")
        taken = T.match_buffer(taken_handle, (1,), "uint32")
        out = T.match_buffer(out_handle, problem.shape("out"), problem.dtype, align=16)
        lse = T.meta_var(match_optional("lse", lse_handle, problem.lse_shape, "float32"))
        q_map, k_map, v_map = T.meta_var(tensor_maps(g, q, k, v))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([grid])
        thread = T.thread_id([g.cta_threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024))
        ring.initialize(base, thread)
        if thread == g.threads:
            prefetch_maps([*q_map.maps, *k_map.maps, *v_map.maps])
        T.ptx["griddepcontrol.wait"]()
        if thread >= g.threads:
            if g.trades_registers:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
            if thread == g.threads:
                following = T.alloc_local([1], "uint32")
                item = T.alloc_local([1], "int32")
                work = T.alloc_local([4], "int32")
                t = T.alloc_local([1], "int32")  # items, and tiles, that were sent
                c = T.alloc_local([1], "int32")
                item[0] = cta
                t[0] = 0
                c[0] = 0
                if problem.block_map is not None:
                    listed = T.alloc_local([1], "int32")
                    listed[0] = items[n_items - 1, 0]
                count = T.meta_var(n_items if problem.block_map is None else listed[0])
                entry = T.alloc_local([2], "int32")
                sent = T.alloc_local([3], "int32")
                sent[0] = -1
                producer.look_up(items, entries, item[0], count, work, entry)
                while item[0] < count:
                    producer.send_item(base, q_map, items, item[0], work, t[0])
                    producer.send_blocks(
                        base, k_map, v_map, entries, keep_bits, work, entry, sent, c,
                        lambda: take(taken, count, following),
                    )  # fmt: skip
                    item[0] = grid + T.cast(following[0], "int32")
                    producer.look_up(items, entries, item[0], count, work, entry)
                    t[0] = t[0] + 1
                    if not ahead:
                        # The next item's queries lie where this one's output does, which needs these values.
                        producer.send_values(base, v_map, entries, sent, c[0])
                        sent[0] = -1
                producer.send_values(base, v_map, entries, sent, c[0])
                # All that is left is in flight: the next kernel's CTAs may start where this one's end.
                T.ptx["griddepcontrol.launch_dependents"]()
                producer.send_end(base, t[0])
        else:
            if g.trades_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](g.registers_at(g.ctas_per_multiprocessor))
            s = T.alloc_local([4 * g.score_tiles], "float32")
            acc = T.alloc_local([4 * g.value_tiles], "float32")
            p = T.alloc_local([2 * g.score_tiles], "uint32")
            keep = T.alloc_local([g.keep_words], "uint32")
            state = T.meta_var(consumer.row_state())
            row_max = T.meta_var(state.row_max)
            row_sum = T.meta_var(state.row_sum)
            # The first fields of this item and of the next; the others are loaded when they are needed.
            place = T.alloc_local([Item.FIRST_ROW], "int32")
            coming = T.meta_var(IRBuilder.name("coming", T.alloc_local([Item.FIRST_ROW], "int32")) if ahead else place)
            rest = T.alloc_local([len(Item) - Item.FIRST_ROW], "int32")
            last = T.alloc_local([1], "uint32")
            # A block's first key, and the key count.
            keys = T.meta_var(IRBuilder.name("keys", T.alloc_local([2], "int32")) if problem.has_key_count else None)
            t = T.alloc_local([1], "int32")
            c = T.alloc_local([1], "int32")
            warp = uniform_warp(thread)
            lane = T.meta_var(thread % 32)
            warpgroup = T.meta_var(warp // 4)
            t[0] = 0
            c[0] = 0
            consumer.open_turns(warpgroup)
            receive(s, place, base, warpgroup, 0, 0)
            while place[Item.HEAD] >= 0:
                b = T.meta_var(place[Item.HEAD] // q_heads)
                h = T.meta_var(place[Item.HEAD] % q_heads)
                begin = T.meta_var(place[Item.BEGIN])
                full = T.meta_var(place[Item.FULL])
                end = T.meta_var(place[Item.END])
                first_row, splits, split_number, first_slot = T.meta_var([rest[i] for i in range(4)])
                warp_row = T.meta_var(first_row + warp * (16 * config.token_stride))
                consumer.reset(state)
                for i in T.unroll(4 * g.value_tiles):
                    acc[i] = T.float32(0)
                if problem.continues or problem.bias_shape is not None:
                    load_fields(rest, base, t[0], Item.FIRST_ROW)
                if problem.continues:
                    if split_number == 0:
                        parts.load_prior(prior, prior_lse, b, h, warp_row, lane, acc, row_max, row_sum)
                        consumer.go_on(state)

                if problem.has_key_count:
                    keys[1] = key_count[problem.key_count_index(b)]
                scored = T.meta_var(
                    lambda entry: SimpleNamespace(
                        look_ahead=lambda: find_key(keys, entries, entry),
                        to_natural=lambda s: natural_scores(s, bias, b, h, warp_row, entries, entry, lane),
                        drop_keys=lambda s: drop_keys(s, keys, lane),
                    )
                )
                consumer.first(s, acc, p, keep, state, base, warp, lane, c[0], begin < full, scored(begin))
                c[0] = c[0] + 1
                for i in T.serial(begin + 1, full):
                    consumer.step(s, acc, p, keep, state, base, warp, lane, t[0], c[0], True, scored(i))
                    c[0] = c[0] + 1
                for i in T.serial(T.max(begin + 1, full), end):
                    consumer.step(s, acc, p, keep, state, base, warp, lane, t[0], c[0], False, scored(i))
                    c[0] = c[0] + 1
                consumer.start_sums(acc, p, base, c[0] - 1)
                consumer.commit()
                if ahead:
                    receive(s, coming, base, warpgroup, t[0] + 1, c[0])
                consumer.await_sums(acc, base, lane, c[0] - 1, 1 if ahead else 0)

                # The last of the items that share a block row adds up all results, normalizes and stores.
                load_fields(rest, base, t[0], Item.FIRST_ROW)
                last[0] = T.uint32(1)
                if splits > 1:
                    split.write(partials, first_slot + split_number, thread, acc, row_max, row_sum)
                    split.arrive(
                        last, arrivals.ptr_to([first_slot, warpgroup]), splits, thread % WARPGROUP,
                        base + (g.flag_offset + warpgroup * WORD_BYTES), lambda: sync_warpgroup(warpgroup),
                    )  # fmt: skip
                    if last[0] != T.uint32(0):
                        split.merge(partials, first_slot, splits, thread, acc, row_max, row_sum)
                # Other warps' products read the queries where this one's output goes; those of other warpgroups
                # too, where the panels of queries and of the output differ in width.
                if g.q_tile.pitch == g.out_tile.pitch:
                    sync_warpgroup(warpgroup)
                else:
                    T.ptx["bar.sync"](T.uint32(OUTPUT_BARRIER), T.uint32(g.threads))
                if last[0] != T.uint32(0):
                    if problem.sink_dtype is not None:
                        sinks.add(T.cast(sink[h], "float32"), lane, acc, row_max, row_sum)
                    softmax.normalize(acc, row_sum)
                    staged = T.meta_var(base + rings.q.stage(t[0]) * g.q_bytes + warp * (16 * g.out_tile.pitch))
                    store_out(acc, staged, lane, rows_of(out, "out", b, h), warp_row)
                    if problem.gives_lse:
                        parts.store_lse(lse, b, h, warp_row, lane, row_max, row_sum)
                T.ptx["fence.proxy.async.shared::cta"]()  # later queries arrive by the async proxy
                T.cuda.warp_sync()
                ring.release(rings.q, base, t[0], lane)
                t[0] = t[0] + 1
                if ahead:
                    for i in T.unroll(Item.FIRST_ROW):
                        place[i] = coming[i]
                else:
                    receive(s, place, base, warpgroup, t[0], c[0])
            T.ptx["wgmma.wait_group.sync.aligned"](0)

    optional = {"bias_handle": problem.bias_shape, "sink_handle": problem.sink_dtype, "prior_handle": problem.continues}
    optional |= {"key_count_handle": problem.has_key_count}
    optional |= {"prior_lse_handle": problem.continues, "lse_handle": problem.gives_lse}
    absent = [name for name, given in optional.items() if not given]
    blocks = "" if config.together == 1 else f"{config.together}x"
    symbol = f"warp_specialized_attention_{config.block_m}x{blocks}{config.block_n}x{config.stages}"
    return finished(kernel, symbol, absent, fills=True, waits=True)
