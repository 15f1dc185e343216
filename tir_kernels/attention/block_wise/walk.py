"""How a CTA of the CUDA block-wise kernel walks its listed blocks: it reads lists and keep bits and copies tiles ahead.

Shared memory holds a ring of `stages` pairs of a K and a V tile.  While block p is computed, block p + `ahead` is
copied; its list entry was read one step earlier.  With one stage, V is copied during QKᵀ, and the next K during the
softmax and the product with V.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.attention.block_wise.geometry import Geometry
from tir_kernels.cuda.tile import tile_copy


@dataclass(frozen=True)
class Listed:
    """Inputs of a CTA's walk: its range of blocks, thread indices, and addresses of lists and tiles.

    entries, keep_bits : the kernel's operands
    begin, end : the listed blocks begin … end - 1
    k_rows, v_rows : global address of (row, element) of the head's keys and values
    thread, warp, lane : the thread's and the warp's number in the CTA, and the lane in the warp
    stage0 : shared address of the first stage
    """

    entries: Any
    keep_bits: Any
    begin: Any
    end: Any
    k_rows: Callable
    v_rows: Callable
    thread: Any
    warp: Any
    lane: Any
    stage0: Any


@dataclass(frozen=True)
class Walk:
    """A walk's registers: local buffers of one element each, except for the keep bits of this warp's fragments.

    over : the inputs of the walk
    keep, next_keep : uint32 (row tiles * words,), the bits of this block and of the next
    active : uint32, 0 where this warp's rows keep nothing of this block
    part, next_part, coming_part : int32, numbers among the partial blocks of this block, the next and the one after; -1
        for a full block
    key, next_key, coming_key : int32, first token of this block, of the next to be copied and of the one after
    read_at : int32, offset of this block's stage, in bytes
    """

    over: Listed
    keep: Any
    next_keep: Any
    active: Any
    part: Any
    next_part: Any
    coming_part: Any
    key: Any
    next_key: Any
    coming_key: Any
    read_at: Any


def begin_walk(g: Geometry, over: Listed) -> Walk:
    """A walk with its registers; call it while a kernel is parsed."""
    words = g.row_tiles * g.keep_words
    shapes = {"keep": (words, "uint32"), "next_keep": (words, "uint32"), "active": (1, "uint32")}
    names = ("part", "next_part", "coming_part", "key", "next_key", "coming_key", "read_at")
    shapes |= {name: (1, "int32") for name in names}
    return Walk(over, **{name: IRBuilder.name(name, T.alloc_local([n], dtype)) for name, (n, dtype) in shapes.items()})


def walk_functions(g: Geometry, softmax):
    """`start`, `load_first_keep`, `await_first`, and for each block `arrive`, `find_active`, `look_ahead`, `step`."""
    problem, config, stages, stage_bytes = g.problem, g.config, g.config.stages, g.stage_bytes
    ahead = max(1, stages - 1)  # blocks from the one that is computed to the one whose copy starts
    copy_k = tile_copy(g.k_tile, problem.head_dim, problem.kv_len, g.ragged_kv, config.token_stride)
    copy_v = tile_copy(g.v_tile, problem.v_head_dim, problem.kv_len, g.ragged_kv, config.token_stride)

    @T.inline
    def copy_keys(walk, stage, first_key):
        copy_k(stage, walk.over.thread, walk.over.k_rows, first_key)

    @T.inline
    def copy_values(walk, stage, first_key):
        copy_v(stage + g.k_tile.size, walk.over.thread, walk.over.v_rows, first_key)

    @T.inline
    def commit():
        T.ptx["cp.async.commit_group"]()

    @T.inline
    def wait(pending):
        """Wait until at most the `pending` latest copy groups are in flight, in every thread."""
        T.ptx["cp.async.wait_group"](pending)
        if config.warpgroup:  # wgmma reads shared memory through the async proxy
            T.ptx["fence.proxy.async.shared::cta"]()
        T.cuda.cta_sync()

    @T.inline
    def start(walk, first_key):
        """Begin the copies of the first blocks; `first_key` is the first token of the first block."""
        walk.key[0] = first_key
        walk.part[0] = T.int32(-1)
        walk.next_part[0] = T.int32(-1)
        if walk.over.begin < walk.over.end:
            walk.part[0] = walk.over.entries[walk.over.begin, 1]
            walk.next_part[0] = walk.over.entries[walk.over.begin + 1, 1]
            copy_keys(walk, walk.over.stage0, walk.key[0])
            if stages > 1:
                copy_values(walk, walk.over.stage0, walk.key[0])
        commit()
        for i in T.unroll(1, ahead):
            if walk.over.begin + i < walk.over.end:
                walk.next_key[0] = walk.over.entries[walk.over.begin + i, 0]
                copy_keys(walk, walk.over.stage0 + i * stage_bytes, walk.next_key[0])
                copy_values(walk, walk.over.stage0 + i * stage_bytes, walk.next_key[0])
            commit()
        walk.next_key[0] = walk.over.entries[walk.over.begin + ahead, 0]

    @T.inline
    def load_first_keep(walk):
        if walk.part[0] >= 0:
            softmax.load_keep(
                walk.keep, walk.over.keep_bits, walk.part[0], walk.over.warp * g.row_tiles, walk.over.lane
            )

    @T.inline
    def await_first(walk):
        """Wait for the queries, whose copy began before `start`."""
        wait(ahead)

    @T.inline
    def arrive(walk, p):
        """Wait for block p, then start the copy of block p + ahead; with one stage, of the values of p itself."""
        wait(max(stages - 2, 0))
        if stages == 1:
            copy_values(walk, walk.over.stage0, walk.key[0])
        else:
            if p + ahead < walk.over.end:
                write_at = T.meta_var(
                    T.Select(walk.read_at[0] == 0, (stages - 1) * stage_bytes, walk.read_at[0] - stage_bytes)
                )
                copy_keys(walk, walk.over.stage0 + write_at, walk.next_key[0])
                copy_values(walk, walk.over.stage0 + write_at, walk.next_key[0])
        commit()

    @T.inline
    def find_active(walk):
        walk.active[0] = T.uint32(1)
        if g.skips_empty_rows:
            if walk.part[0] >= 0:
                softmax.keeps_any(walk.active, walk.keep)

    @T.inline
    def look_ahead(walk, p):
        """Read what the next steps need: well before its use, but not during QKᵀ, which needs the registers."""
        if stages == 1:
            wait(0)
            if p + 1 < walk.over.end:
                copy_keys(walk, walk.over.stage0, walk.next_key[0])
            commit()
        if walk.next_part[0] >= 0:
            softmax.load_keep(
                walk.next_keep, walk.over.keep_bits, walk.next_part[0], walk.over.warp * g.row_tiles, walk.over.lane
            )
        walk.coming_part[0] = walk.over.entries[p + 2, 1]
        walk.coming_key[0] = walk.over.entries[p + ahead + 1, 0]

    @T.inline
    def step(walk, p):
        """Advance to block p + 1."""
        walk.part[0] = walk.next_part[0]
        walk.next_part[0] = walk.coming_part[0]
        for i in T.unroll(g.row_tiles * g.keep_words):
            walk.keep[i] = walk.next_keep[i]
        if ahead == 1:
            walk.key[0] = walk.next_key[0]
        else:
            walk.key[0] = walk.over.entries[p + 1, 0]
        walk.next_key[0] = walk.coming_key[0]
        if stages > 1:
            walk.read_at[0] = T.Select(walk.read_at[0] == (stages - 1) * stage_bytes, 0, walk.read_at[0] + stage_bytes)

    return SimpleNamespace(
        start=start,
        commit=commit,
        load_first_keep=load_first_keep,
        await_first=await_first,
        arrive=arrive,
        find_active=find_active,
        look_ahead=look_ahead,
        step=step,
    )
