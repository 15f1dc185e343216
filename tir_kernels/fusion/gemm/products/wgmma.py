"""Device code of the CUDA matrix-product kernels that multiplies by wgmma (sm_90a).

Four warps execute one instruction together, on 64 rows of a.  Both operands are read from shared memory through
descriptors, in the layout that cp.async left there.  Accumulators have the layout of mma.sync, so all other device code
is shared.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import SHORT
from tir_kernels.cuda.shared_tiles import MMA_ROWS, PANEL, PanelTile
from tir_kernels.cuda.wgmma import PIN_FLOAT, descriptor, uniform_warp
from tir_kernels.fusion.gemm.sizes.geometry import GROUP_WARPS, GemmGeometry
from tir_kernels.fusion.gemm.tile import block_copy

GROUP_ROWS = GROUP_WARPS * MMA_ROWS


def warpgroup_multiply(g: GemmGeometry):
    """`multiply(acc, a_address, w_address, continues)`: multiply a block of k; acc starts at zero unless `continues`.

    The addresses are of the first rows of a and w that the warpgroup reads.  Products are still under way on return.
    """
    n_rows = g.problem.w_layout == "nk"
    dtype = SHORT[g.problem.dtype]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{g.warp_n}k16.f32.{dtype}.{dtype}"
    words = 4 * g.col_tiles

    def w_step(step: int) -> int:
        return g.w_tile.offset(0, 2 * step) if n_rows else step * MMA_ROWS * g.w_tile.pitch

    @T.inline
    def multiply(acc, a_address, w_address, continues):
        T.ptx["wgmma.fence.sync.aligned"]()
        for step in T.unroll(g.steps):
            for m in T.unroll(g.row_tiles):
                T.ptx[instruction](
                    *[acc[m * words + i] for i in range(words)],
                    descriptor(g.a_tile, a_address + (m * GROUP_ROWS * g.a_tile.pitch + g.a_tile.offset(0, 2 * step))),
                    descriptor(g.w_tile, w_address + w_step(step)),
                    T.bool(True) if step > 0 else continues, 1, 1, 0, 0 if n_rows else 1,
                )  # fmt: skip
        T.ptx["wgmma.commit_group.sync.aligned"]()

    return multiply


def warpgroup_start(g: GemmGeometry):
    """`a(warp)` and `w(warp)`: bytes from a stage's start to what a warp's warpgroup reads first."""

    def a(warp):
        return g.warp_row(warp // GROUP_WARPS * GROUP_WARPS) * g.a_tile.pitch

    def w(warp):
        column = g.warp_column(warp)
        if g.problem.w_layout == "nk":
            return g.a_tile.size + column * g.w_tile.pitch
        assert isinstance(g.w_tile, PanelTile)
        return g.a_tile.size + column // PANEL * g.w_tile.panel_bytes

    return SimpleNamespace(a=a, w=w)


@T.inline
def pin_accumulators(acc, g):
    """Keep the compiler from moving a use of the accumulators across the wait before."""
    for i in T.unroll(4 * g.row_tiles * g.col_tiles):
        T.cuda.func_call(PIN_FLOAT[0], acc[i], source_code=PIN_FLOAT[1])


def warpgroup_product(g: GemmGeometry):
    """`product(acc, base, thread, a, w, row, column, begin, end)`, with the same result as that of `tile_product`.

    A block's products are still under way when the next block's products start.  Its stage is free when these have
    started in all warpgroups, so blocks are copied `stages - 2` ahead.
    """
    copy, multiply, start = block_copy(g), warpgroup_multiply(g), warpgroup_start(g)
    stages, stage_bytes = g.config.stages, g.stage_bytes

    @T.inline
    def product(acc, base, thread, a, w, row, column, begin, end, meanwhile=None):
        read_at = T.alloc_local([1], "int32")  # offset of the stage that is multiplied, in bytes
        write_at = T.alloc_local([1], "int32")
        for i in T.unroll(stages - 1):
            if begin + i < end:
                copy(base + i * stage_bytes, thread, a, w, row, column, begin + i)
            T.ptx["cp.async.commit_group"]()
        if meanwhile is not None:
            meanwhile()
        warp = uniform_warp(thread)
        a_start = base + start.a(warp)
        w_start = base + start.w(warp)
        read_at[0] = 0
        write_at[0] = (stages - 1) * stage_bytes
        for block in T.serial(begin, end):
            T.ptx["cp.async.wait_group"](stages - 3)
            T.ptx["fence.proxy.async.shared::cta"]()  # wgmma reads through the async proxy
            T.cuda.cta_sync()
            multiply(acc, a_start + read_at[0], w_start + read_at[0], block > begin)
            read_at[0] = T.Select(read_at[0] == (stages - 1) * stage_bytes, 0, read_at[0] + stage_bytes)
            if block > begin:
                if block + (stages - 2) < end:
                    copy(base + write_at[0], thread, a, w, row, column, block + (stages - 2))
                T.ptx["cp.async.commit_group"]()
                write_at[0] = T.Select(write_at[0] == (stages - 1) * stage_bytes, 0, write_at[0] + stage_bytes)
            T.ptx["wgmma.wait_group.sync.aligned"](1)
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        pin_accumulators(acc, g)

    return product
