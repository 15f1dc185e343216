"""The CUDA kernel of a grouped product whose operands the tensor memory accelerator copies (sm_90a).

As many CTAs as run at once take the tiles of all groups in turn, as `gemm/tma.py` does with those of one product, whose
stages, products and epilogue these are.  How many tiles there are, and which group's a tile is, is known on the device
only: each CTA lists them first (`tiles.py`).  Weights have a map of three dimensions, so that columns and rows past the
end of a group's matrix arrive as zeros.  Rows past the end of a group are those of the next one: they are multiplied
and not stored, but a warpgroup none of whose rows are the group's multiplies nothing.

Rows of a that are chosen at run time are read where they lie (`gather.py`): a matrix of them in their order would be
written and read once more, which takes 370 / n of the product's time if memory and tensor cores are as fast as an
H200's.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, shared_memory
from tir_kernels.cuda.registers import PRODUCER_REGISTERS, consumer_registers, even_registers
from tir_kernels.cuda.wgmma import uniform_warp
from tir_kernels.fusion.gemm.finish.epilogue import epilogue
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import GROUP_WARPS
from tir_kernels.fusion.gemm.tma import boxes, encoded_maps, pipeline
from tir_kernels.fusion.grouped.gather import WRITERS, gathered_copies
from tir_kernels.fusion.grouped.kernel import GroupedGeometry, geometry, rows_of_group
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.grouped.tiles import Tile, list_bytes, tile_list

FEW_ROWS = 8  # that a copying thread may copy parts of with PRODUCER_REGISTERS, and its registers for more
MANY_ROWS_REGISTERS = 56


def shared_bytes(problem: GroupedProblem, config: GemmConfig) -> int:
    """Bytes of shared memory of a CTA: those of a product, then the list of tiles."""
    return geometry(problem, config).shared_bytes + list_bytes(problem.groups)


def resident(problem: GroupedProblem, config: GemmConfig, gpu: GPU) -> int:
    """CTAs that run at once on a multiprocessor."""
    return min(geometry(problem, config).ctas_per_multiprocessor, gpu.ctas_that_share(shared_bytes(problem, config)))


def grid_size(problem: GroupedProblem, config: GemmConfig, gpu: GPU) -> int:
    """CTAs of the grid on a GPU: as many as run at once, at most one for each tile that any offsets can make."""
    tiles = problem.row_tiles(config.block_m) * geometry(problem, config).n_tiles
    return min(tiles, resident(problem, config, gpu) * gpu.multiprocessors)


def maps_of(problem: GroupedProblem, config: GemmConfig, a, w) -> list:
    """The maps of a, None if its rows are gathered, and w; call it while a kernel is parsed."""
    box = boxes(geometry(problem, config))
    of_w = w, problem.w_shape, (1, *box["w"])
    if problem.gathered_from is not None:
        return [None, *encoded_maps(problem.dtype, w=of_w)]
    return encoded_maps(problem.dtype, a=(a, (problem.m, problem.k), box["a"]), w=of_w)


def grouped_tma_kernel(problem: GroupedProblem, config: GemmConfig, name: str, gpu: GPU) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, offsets, rows where they are gathered, out."""
    g, gathers = geometry(problem, config), problem.gathered_from is not None
    stages = pipeline(g, WRITERS if gathers else 0)
    tiles = tile_list(problem, config.block_m, config.block_n, g.n_tiles)
    copies = gathered_copies(problem, g, stages)
    set_threads, sets, groups = 32 * config.warps, config.sets, problem.groups
    grid, accumulators = grid_size(problem, config, gpu), 4 * g.row_tiles * g.col_tiles
    kept = MANY_ROWS_REGISTERS if gathers and copies.size > FEW_ROWS else PRODUCER_REGISTERS
    registers = consumer_registers(g.threads, g.ctas_per_multiprocessor, kept)
    trades_registers = registers > even_registers(g.threads, g.ctas_per_multiprocessor)
    has_rows_each = sets == 1 and config.warps_m > GROUP_WARPS  # whether warpgroups of a tile have rows of their own

    def tile_geometry(end):
        return GroupedGeometry(rows_of_group(problem, end), config)

    @T.jit(private=True)
    def kernel(
        a_handle: T.handle,
        w_handle: T.handle,
        offsets_handle: T.handle,
        rows_handle: T.Optional(T.handle),
        out_handle: T.handle,
    ):
        a = T.match_buffer(a_handle, (problem.a_rows, problem.k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        offsets = T.match_buffer(offsets_handle, (groups,), problem.offsets_dtype)
        rows = T.meta_var(match_optional("rows", rows_handle, (problem.m,), problem.rows_dtype))
        out = T.match_buffer(out_handle, (problem.m, problem.n), problem.dtype, align=16)
        a_map, w_map = T.meta_var(maps_of(problem, config, a, w))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([grid])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(shared_bytes(problem, config), align=1024))
        listed = T.meta_var(base + g.shared_bytes)
        state = T.meta_var(stages.state())
        tile = T.alloc_local([len(Tile)], "int32")
        total = T.alloc_local([1], "int32")
        tiles.fill(listed, offsets, thread)
        stages.initialize(base, thread)
        tiles.count(total, listed)
        own_tiles = (total[0] + grid - 1 - cta) // grid
        if thread >= sets * set_threads:
            if trades_registers:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](kept)
            if gathers:
                chosen = T.alloc_local([copies.size], "int32")
                copier = thread - sets * set_threads
                for i in T.serial(own_tiles):
                    tiles.find(tile, listed, cta + i * grid)
                    if tile[Tile.GROUP] < groups:
                        copies.choose(chosen, rows, tile[Tile.ROW], tile[Tile.END], copier)
                        copies.produce(state, base, a, w_map, chosen, tile[Tile.COLUMN], tile[Tile.GROUP], copier)
                T.ptx["cp.async.wait_group"](0)
            elif thread == sets * set_threads:
                for i in T.serial(own_tiles):
                    tiles.find(tile, listed, cta + i * grid)
                    if tile[Tile.GROUP] < groups:
                        row = T.meta_var(tile[Tile.ROW])
                        column = T.meta_var(tile[Tile.COLUMN])
                        stages.produce(state, base, a_map, w_map, row, column, 0, g.k_blocks, (tile[Tile.GROUP],))
        else:
            if trades_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](registers)
            acc = T.alloc_local([accumulators], "float32")
            row_words = T.alloc_local([1], "uint32")
            own_set = thread // set_threads
            own_thread = T.meta_var(thread % set_threads)
            first_row = g.warp_row(uniform_warp(own_thread) // GROUP_WARPS * GROUP_WARPS)
            tiles.find(tile, listed, cta + own_set * grid)
            stages.skip(state, own_set * g.k_blocks)
            for i in T.serial((own_tiles + (sets - 1) - own_set) // sets):
                group = tile[Tile.GROUP]
                row = tile[Tile.ROW]
                end = tile[Tile.END]
                column = tile[Tile.COLUMN]
                # The next tile is found beside the first products of this one.
                find_next = T.meta_var(lambda: tiles.find(tile, listed, cta + ((i + 1) * sets + own_set) * grid))
                if group == groups:
                    find_next()
                    for j in T.unroll(accumulators):
                        acc[j] = T.float32(0)
                else:
                    if has_rows_each:
                        if row + first_row < end:
                            stages.consume(acc, state, base, own_thread, own_set, i, g.k_blocks, find_next)
                        else:
                            find_next()
                            stages.pass_by(state, base, own_thread, g.k_blocks)
                    else:
                        stages.consume(acc, state, base, own_thread, own_set, i, g.k_blocks, find_next)
                finish = T.meta_var(epilogue(tile_geometry(end)))
                staging = base + own_set * (config.warps * g.staging_bytes)
                finish.store(acc, staging, own_thread, row_words, [], out, row, column)
                stages.skip(state, (sets - 1) * g.k_blocks)

    absent = ["rows_handle"] * (not gathers)
    return finished(kernel, f"{name}_{'gathered_' * gathers}{config.symbol}", absent, fills=True)
