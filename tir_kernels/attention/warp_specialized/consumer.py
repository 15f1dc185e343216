"""A warpgroup of the warp-specialized kernel that computes 64 rows of an item's block row.

The scores of a block are multiplied while the probabilities of the block before are multiplied with its values, and the
softmax of the one runs under the second product of the other.  Partial blocks come first; the loop over full blocks has
no masking code.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.wgmma import warpgroup_products
from tir_kernels.attention.warp_specialized.geometry import WARPGROUP_ROWS, WORD_BYTES, Geometry
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.wgmma import PIN_FLOAT


def consumer_functions(g: Geometry, rings, ring, softmax):
    """`first`, `step` and `last` of an item's blocks, for one warpgroup.

    Block c, counted over all items, is in the stages of `rings`.  `first` leaves the probabilities of the first block in
    p; `step` computes the next block's and adds the product of those in p with their values; `last` adds the last one.
    """
    products = warpgroup_products(g)
    lane_bytes = g.keep_words * WORD_BYTES

    @T.inline
    def pin_float(registers, n):
        for i in T.unroll(n):
            T.cuda.func_call(PIN_FLOAT[0], registers[i], source_code=PIN_FLOAT[1])

    @T.inline
    def start_scores(s, base, warpgroup, c):
        ring.await_arrived(rings.k, base, c)
        products.start_qk(
            s,
            base + warpgroup * (WARPGROUP_ROWS * g.q_tile.pitch),
            base + g.k_offset + rings.k.stage(c) * g.k_tile.size,
        )
        T.ptx["wgmma.commit_group.sync.aligned"]()

    @T.inline
    def start_sums(o, p, base, c):
        ring.await_arrived(rings.v, base, c)
        products.start_pv(o, p, base + g.v_offset + rings.v.stage(c) * g.v_tile.size)
        T.ptx["wgmma.commit_group.sync.aligned"]()

    @T.inline
    def load_keep(keep, base, warp, lane, c):
        start = T.meta_var(base + g.keep_offset + rings.k.stage(c) * g.keep_bytes + (warp * 32 + lane) * lane_bytes)
        if g.keep_words == 2:
            T.ptx["ld.shared.v2.b32"](keep[0], keep[1], address(start))
        else:
            for i in T.unroll(g.keep_words):
                T.ptx["ld.shared.b32"](keep[i], address(start + i * WORD_BYTES))

    @T.inline
    def exponentiate(s, row_max, row_sum, rescale):
        new_max = T.alloc_local([1], "float32")
        offset = T.alloc_local([1], "float32")
        for r in T.unroll(2):
            softmax.exponentiate(s, row_max, row_sum, new_max, offset, rescale, r, 0, r)

    @T.inline
    def rescale_sums(o, rescale):
        for r in T.unroll(2):
            softmax.scale_rows(o, rescale, r, 0, r)

    @T.inline
    def first(s, o, p, keep, row_max, row_sum, rescale, base, warp, lane, c, is_part, to_natural):
        start_scores(s, base, warp // 4, c)
        if is_part:
            load_keep(keep, base, warp, lane, c)
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        pin_float(s, 4 * g.score_tiles)
        T.cuda.warp_sync()  # every lane has its keep bits
        ring.release(rings.k, base, c, lane)
        to_natural(s)
        if is_part:
            softmax.mask(s, keep)
        exponentiate(s, row_max, row_sum, rescale)
        if g.problem.continues:
            rescale_sums(o, rescale)
        products.pack(p, s)

    @T.inline
    def step(s, o, p, keep, row_max, row_sum, rescale, base, warp, lane, c, is_part, to_natural):
        start_scores(s, base, warp // 4, c)
        if is_part:
            load_keep(keep, base, warp, lane, c)
        start_sums(o, p, base, c - 1)
        T.ptx["wgmma.wait_group.sync.aligned"](1)
        pin_float(s, 4 * g.score_tiles)
        T.cuda.warp_sync()  # every lane has its keep bits
        ring.release(rings.k, base, c, lane)
        to_natural(s)
        if is_part:
            softmax.mask(s, keep)
        exponentiate(s, row_max, row_sum, rescale)
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        pin_float(o, 4 * g.value_tiles)
        ring.release(rings.v, base, c - 1, lane)
        products.pack(p, s)
        rescale_sums(o, rescale)

    @T.inline
    def last(o, p, base, lane, c):
        start_sums(o, p, base, c)
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        pin_float(o, 4 * g.value_tiles)
        ring.release(rings.v, base, c, lane)

    return SimpleNamespace(first=first, step=step, last=last)
