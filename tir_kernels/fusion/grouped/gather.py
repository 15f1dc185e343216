"""Device code of the warps that copy rows of a which are chosen at run time, in place of copies of neighbouring rows.

The tensor memory accelerator copies boxes, so all threads of the copying warpgroup copy a's tile by cp.async, each 16
bytes of every 16th row, and one of them starts the copies of w.  A stage is complete when w has arrived, when every
thread's copies have, and when each warp has said that what it wrote itself is written: rows that do not exist are NaN.
Rows past the end of a group are not copied: what they hold reaches no row that is stored.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.registers import PRODUCER_THREADS
from tir_kernels.cuda.shared_tiles import CHUNK, CHUNK_BYTES, PanelTile
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.grouped.problem import GroupedProblem

WARP = 32
WRITERS = PRODUCER_THREADS + PRODUCER_THREADS // WARP  # arrivals of a stage besides that of w
PAST, MISSING = -1, -2  # in place of a row: one past the end of the group, one that does not exist
NAN_PAIR = 0x7FFF7FFF  # of float16 and of bfloat16


def gathered_copies(problem: GroupedProblem, g: GemmGeometry, stages):
    """Functions of the copying threads, numbered from 0; `stages` is the product's `pipeline`.

    choose(chosen, rows, first, end, thread)     chosen[…] = the rows of a that a thread copies parts of
    produce(state, base, a, w_map, chosen, column, group, thread)      copy all blocks of k of a tile

    `chosen` has `size` elements.
    """
    config, k = g.config, problem.k
    tile = PanelTile(config.block_m, config.block_k, PRODUCER_THREADS)
    step = tile.rows_per_pass

    @T.inline
    def choose(chosen, rows, first, end, thread):
        for i in T.unroll(tile.passes):
            row = T.meta_var(first + thread // tile.threads_per_row + i * step)
            chosen[i] = PAST
            if row < end:
                index = rows[row]
                chosen[i] = T.Select(T.And(index >= 0, index < problem.a_rows), T.cast(index, "int32"), MISSING)

    @T.inline
    def copy_a(stage, a, chosen, column, thread):
        start = stage + tile.offset(thread // tile.threads_per_row, thread % tile.threads_per_row)
        own_column = column + thread % tile.threads_per_row * CHUNK
        for i in T.unroll(tile.passes):
            if chosen[i] >= 0:
                T.ptx["cp.async.cg.shared.global.L2::128B"](
                    address(tile.pass_offset(start, i)),
                    a.ptr_to([chosen[i], own_column]),
                    CHUNK_BYTES,
                    T.Select(own_column < k, T.uint32(CHUNK_BYTES), T.uint32(0)),
                )
            if chosen[i] == MISSING:
                for word in T.unroll(CHUNK_BYTES // 4):
                    T.ptx["st.shared.b32"](address(tile.pass_offset(start, i) + word * 4), T.uint32(NAN_PAIR))
                T.ptx["fence.proxy.async.shared::cta"]()

    @T.inline
    def produce(state, base, a, w_map, chosen, column, group, thread):
        for block in T.serial(g.k_blocks):
            full = stages.barrier(base, state[0], 0)
            stage = base + state[0] * g.stage_bytes
            T.cuda.mbarrier_wait(stages.barrier(base, state[0], 1), state[1] ^ 1)
            if thread == 0:
                T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](full, T.uint32(g.w_tile.size))
                stages.copy_w(stage, w_map, block * config.block_k, column, (group,), full)
            copy_a(stage, a, chosen, block * config.block_k, thread)
            T.ptx["cp.async.mbarrier.arrive.noinc.shared::cta.b64"](full)
            T.cuda.warp_sync()
            if thread % WARP == 0:
                T.ptx["mbarrier.arrive.shared::cta.b64"](full, T.uint32(1))
            stages.advance(state)

    return SimpleNamespace(choose=choose, produce=produce, size=tile.passes)
