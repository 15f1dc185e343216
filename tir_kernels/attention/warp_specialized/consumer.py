"""A warpgroup of the warp-specialized kernel that computes 64 rows of an item's block row.

The scores of a block are multiplied while the probabilities of the block before are multiplied with its values, and the
softmax of the one runs under the second product of the other.  Partial blocks come first; the loop over full blocks has
no masking code.
"""

from types import SimpleNamespace

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.attention.block_wise.softmax import NEGATIVE_INFINITY
from tir_kernels.attention.block_wise.wgmma import warpgroup_products
from tir_kernels.attention.warp_specialized.geometry import WARPGROUP, WARPGROUP_ROWS, WORD_BYTES, Geometry
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.wgmma import PIN_FLOAT

# From this head size on products take longer than exponentials, and warpgroups need no order: turns cost 2 to 10 % then
# on an H200, and gain 1 to 4 % below.
MATRIX_BOUND = 128
FIRST_TURN = 8  # number of the first warpgroup's barrier for its turn


def consumer_functions(g: Geometry, rings, ring, softmax):
    """`start_scores`, `start_sums`, `commit`, `await_sums`, and from these `first` and `step`, for one warpgroup.

    Block c and item t, counted from 0 over all that the CTA takes, are in the stages of `rings`.
    """
    products = warpgroup_products(g)
    blocks_of_word = g.config.together // g.keep_words  # 1, or 2: words have keep bits of 64 keys
    takes_turns = g.warpgroups > 1 and g.head_dim < MATRIX_BOUND
    lane_bytes = g.block_words * WORD_BYTES

    # Warpgroups start their products in turn.  So one's softmax runs beside the other's products; without turns both
    # would multiply and both exponentiate at the same time.
    @T.inline
    def await_turn(warpgroup):
        if takes_turns:
            T.ptx["bar.sync"](T.cast(FIRST_TURN + warpgroup, "uint32"), T.uint32(2 * WARPGROUP))

    @T.inline
    def give_turn(warpgroup):
        if takes_turns:
            T.ptx["bar.arrive"](T.cast(FIRST_TURN + warpgroup, "uint32"), T.uint32(2 * WARPGROUP))

    @T.inline
    def open_turns(warpgroup):
        """Give the first warpgroup its first turn; every other turn is given by the warpgroup before."""
        if warpgroup == g.warpgroups - 1:
            give_turn(0)

    @T.inline
    def start_scores(s, base, warpgroup, t, c):
        """Start the product of item t's queries and the keys of block c, which have arrived."""
        products.start_qk(
            s,
            base + rings.q.stage(t) * g.q_bytes + warpgroup * (WARPGROUP_ROWS * g.q_tile.pitch),
            base + g.k_offset + rings.k.stage(c) * g.k_tile.size,
        )

    @T.inline
    def start_sums(o, p, base, c):
        ring.await_arrived(rings.v, base, c)
        products.start_pv(o, p, base + g.v_offset + rings.v.stage(c) * g.v_tile.size)

    @T.inline
    def commit():
        T.ptx["wgmma.commit_group.sync.aligned"]()

    @T.inline
    def load_keep(keep, base, warp, lane, c):
        start = T.meta_var(base + g.keep_offset + rings.k.stage(c) * g.keep_bytes + (warp * 32 + lane) * lane_bytes)
        if g.config.together == 1 and g.keep_words == 2:
            T.ptx["ld.shared.v2.b32"](keep[0], keep[1], address(start))
        elif g.config.together == 1:
            for i in T.unroll(g.keep_words):
                T.ptx["ld.shared.b32"](keep[i], address(start + i * WORD_BYTES))
        elif blocks_of_word == 1:
            for i in T.unroll(g.keep_words):
                T.ptx["ld.shared.b32"](keep[i], address(start + i * g.block_keep_bytes))
        else:
            halves = T.alloc_local([2], "uint32")
            for i in T.unroll(g.keep_words):
                for half in T.unroll(2):
                    T.ptx["ld.shared.b32"](halves[half], address(start + (2 * i + half) * g.block_keep_bytes))
                keep[i] = halves[0] | (halves[1] << T.uint32(16))

    @T.inline
    def await_keep():
        """Wait until every lane has its keep bits, which copies to their stage may then overwrite.

        Without the fence an arrival overtakes loads that wait behind other CTAs' stores: on an H200 the loads then
        found the keep bits of a later tile.
        """
        T.ptx["fence.proxy.async.shared::cta"]()
        T.cuda.warp_sync()

    @T.inline
    def exponentiate(s, state):
        softmax.exponentiate_lazily(
            s, state.row_max, state.row_sum, state.new_max, state.offset, state.rescale, state.moved
        )

    @T.inline
    def rescale_sums(o, state):
        if state.moved[0] != T.uint32(0):
            for r in T.unroll(2):
                softmax.scale_rows(o, state.rescale, r, 0, r)

    @T.inline
    def await_sums(o, base, lane, c, pending):
        """Wait for all products but the `pending` latest groups; block c's values have then been read."""
        T.ptx["wgmma.wait_group.sync.aligned"](pending)
        products.pin(o, 4 * g.value_tiles, *PIN_FLOAT)
        ring.release(rings.v, base, c, lane)

    @T.inline
    def first(s, o, p, keep, state, base, warp, lane, c, is_part, scored):
        """Leave in p the probabilities of an item's first block, whose scores were started.

        `scored` is what the kernel does with a block: `look_ahead()` before its scores are there, then `to_natural(s)`
        and, after the keep bits, `drop_keys(s)`.
        """
        scored.look_ahead()
        if is_part:
            load_keep(keep, base, warp, lane, c)
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        products.pin(s, 4 * g.score_tiles, *PIN_FLOAT)
        if is_part:
            await_keep()
        ring.release(rings.k, base, c, lane)
        scored.to_natural(s)
        if is_part:
            softmax.mask(s, keep)
        scored.drop_keys(s)
        exponentiate(s, state)
        if g.problem.continues:
            rescale_sums(o, state)
        products.pack(p, s)

    @T.inline
    def step(s, o, p, keep, state, base, warp, lane, t, c, is_part, scored):
        """Add the product of p and the values of block c - 1; leave in p the probabilities of block c."""
        scored.look_ahead()
        ring.await_arrived(rings.k, base, c)
        await_turn(warp // 4)
        start_scores(s, base, warp // 4, t, c)
        commit()
        if is_part:
            load_keep(keep, base, warp, lane, c)
        start_sums(o, p, base, c - 1)
        commit()
        give_turn((warp // 4 + 1) % g.warpgroups)
        T.ptx["wgmma.wait_group.sync.aligned"](1)
        products.pin(s, 4 * g.score_tiles, *PIN_FLOAT)
        if is_part:
            await_keep()
        ring.release(rings.k, base, c, lane)
        scored.to_natural(s)
        if is_part:
            softmax.mask(s, keep)
        scored.drop_keys(s)
        exponentiate(s, state)
        await_sums(o, base, lane, c - 1, 0)
        products.pack(p, s)
        rescale_sums(o, state)

    def row_state() -> SimpleNamespace:
        """Registers of the softmax of a thread's two rows; call it while a kernel is parsed."""
        sizes = {"row_max": 2, "row_sum": 2, "new_max": 2, "offset": 2, "rescale": 2}
        made = {name: IRBuilder.name(name, T.alloc_local([n], "float32")) for name, n in sizes.items()}
        return SimpleNamespace(**made, moved=IRBuilder.name("moved", T.alloc_local([1], "uint32")))

    @T.inline
    def reset(state):
        """Before the first block: maxima of -inf, sums of 0."""
        for r in T.unroll(2):
            state.row_max[r] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            state.row_sum[r] = T.float32(0)
            state.offset[r] = T.float32(0)

    @T.inline
    def go_on(state):
        """After the maxima were set to those of a prior part."""
        for r in T.unroll(2):
            softmax.set_offset(state.offset, state.row_max, r)

    return SimpleNamespace(
        row_state=row_state,
        reset=reset,
        go_on=go_on,
        open_turns=open_turns,
        start_scores=start_scores,
        start_sums=start_sums,
        commit=commit,
        await_sums=await_sums,
        first=first,
        step=step,
    )
