"""The CUDA kernel of a matrix product whose operands the tensor memory accelerator copies (sm_90a).

As many CTAs as run at once take the tiles of the product in turn.  In each CTA, one thread of a separate warpgroup
starts all copies.  The other warpgroups multiply and run the epilogue.  They wait only for copies, not for each other,
so one is at most `stages` blocks of k ahead of another.  The next tile's copies are under way during an epilogue; if
sets of warps take tiles in turn, so are its products.

TVM's MBarrier and PipelineState are not used.  MBarrier takes barriers from a pool and addresses them by 64-bit
pointers; here barriers lie beside the tiles, at 32-bit addresses from one base.  PipelineState advances by one block;
here `skip` advances by as many blocks as another set of warps takes.
"""

import math
from types import SimpleNamespace

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import GPU
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, prefetch_maps, shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.registers import PRODUCER_REGISTERS, consumer_registers, even_registers
from tir_kernels.cuda.shared_tiles import ELEMENT_BYTES, PANEL, PanelTile
from tir_kernels.cuda.wgmma import uniform_warp
from tir_kernels.fusion.gemm.finish.epilogue import epilogue
from tir_kernels.fusion.gemm.products.wgmma import pin_accumulators, warpgroup_multiply, warpgroup_start
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import BARRIER_BYTES, GemmGeometry
from tir_kernels.fusion.gemm.sizes.waves import Part, parts, slots_of
from tir_kernels.fusion.gemm.tile import matrix_row, row_of, tile_of
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.fusion.steps import match_operands

COPY = "cp.async.bulk.tensor.{}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"  # of a tensor's rank
# Arguments of the driver's cuTensorMapEncodeTiled.
NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_128B, ZERO_FILL = 0, 3, 2, 0


def tensor_map_fields(shape: tuple[int, ...], box: tuple[int, ...]) -> tuple[int, ...]:
    """Fields of the map of a row-major matrix, or of several, copied in boxes: sizes, pitches, box, steps, modes."""
    sizes, steps = shape[::-1], (1,) * len(shape)
    pitches = (ELEMENT_BYTES * math.prod(sizes[:i]) for i in range(1, len(sizes)))
    modes = (NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_128B, ZERO_FILL)
    return (*sizes, *pitches, *box[::-1], *steps, *modes)


def boxes(g: GemmGeometry) -> dict[str, tuple[int, int]]:
    """(rows, columns) that one copy of a and one of w transfers: as many columns as the swizzle spans."""
    return {"a": (g.config.block_m, PANEL), "w": (g.w_tile.rows, PANEL)}


def grid_size(g: GemmGeometry, gpu: GPU) -> int:
    """CTAs of the grid on a GPU: as many as run at once, at most one a tile; with clusters, one for each split."""
    if g.in_clusters:
        return g.ctas
    return min(g.ctas, slots_of(g, gpu))


def tensor_maps(g: GemmGeometry, a, w, tail: GemmGeometry | None = None) -> list:
    """The maps of a and w, and that of w for narrower tiles if their copies differ.

    The host encodes them on its stack before each launch; call it while a kernel is parsed.
    """
    box = boxes(g)
    given = {"a": (a, (g.problem.m, g.problem.k), box["a"]), "w": (w, g.problem.w_shape, box["w"])}
    if tail is not None and boxes(tail)["w"] != box["w"]:
        given["tail"] = w, g.problem.w_shape, boxes(tail)["w"]
    return encoded_maps(g.problem.dtype, **given)


def encoded_maps(dtype: str, **operands) -> list:
    """The maps of operands, each (buffer, its shape, shape of a box), named by their keywords."""
    maps = [T.let[T.handle("tensormap")].as_var() for _ in operands]
    for name, tensor_map in zip(operands, maps):
        T.Bind(T.tvm_stack_alloca("tensormap", 1), var=IRBuilder.name(f"{name}_map", tensor_map))
    for (buffer, shape, box), tensor_map in zip(operands.values(), maps):
        fields = tensor_map_fields(shape, box)
        encode = "runtime.cuTensorMapEncodeTiled"
        T.evaluate(T.call_packed(encode, tensor_map, dtype, len(shape), buffer.data, *fields))
    return maps


def pipeline(g: GemmGeometry, writers: int = 0, frame: GemmGeometry | None = None):
    """Functions of the two sides of the stages: `produce` copies a tile's blocks of k to them, `consume` multiplies.

    `frame` is the geometry that places stages and barriers, where it is not `g`: that of wider tiles in the same CTA.

    `initialize(base, thread, maps)` readies the barriers for the CTA.  `produce`, `consume`, `pass_by` and `skip`
    advance `state`.  `produce` takes the place of the matrix in w, where w's map has more dimensions than a matrix.
    Where threads write a's tile (grouped/gather.py), `writers` of their arrivals complete a stage, too; they use
    `barrier`, `advance` and `copy_w`.

    state[0] is the stage, state[1] the parity of its phase.  A stage's first barrier completes when both operands have
    arrived, its second one when every warp that multiplies has read them.  Each set of warps has one more barrier,
    which completes when the other set waits for no more copies.  It is needed because only the parity of a phase is
    tested: a thread that waits for a phase must know that it is the next one.
    """
    config, stages, sets = g.config, g.config.stages, g.config.sets
    frame = frame or g
    multiply, start = warpgroup_multiply(g), warpgroup_start(g)
    n_rows = g.problem.w_layout == "nk"

    def state():
        made = IRBuilder.name("state", T.alloc_local([3], "int32"))
        for i in range(3):  # state[2], too: nvcc would take an unset one for the stage that is being read
            T.buffer_store(made, 0, [i])
        return made

    def barrier(base, stage, side: int):
        return address(base + (frame.sync_offset + side * stages * BARRIER_BYTES) + stage * BARRIER_BYTES)

    @T.inline
    def advance(state):
        state[0] = state[0] + 1
        if state[0] == stages:
            state[0] = 0
            state[1] = state[1] ^ 1

    assert isinstance(g.w_tile, PanelTile)
    panel_bytes = g.w_tile.panel_bytes

    @T.inline
    def initialize(base, thread, maps=()):
        if thread == 0:
            prefetch_maps(maps)
            for i in T.unroll(stages):
                T.ptx["mbarrier.init.shared::cta.b64"](barrier(base, i, 0), T.uint32(1 + writers))
                T.ptx["mbarrier.init.shared::cta.b64"](barrier(base, i, 1), T.uint32(config.warps))
            if sets == 2:
                for i in T.unroll(2):
                    T.ptx["mbarrier.init.shared::cta.b64"](barrier(base, i, 2), T.uint32(config.warps))
            T.ptx["fence.proxy.async.shared::cta"]()
        T.cuda.cta_sync()

    @T.inline
    def copy_w(stage, w_map, depth, column, place, full):
        """Copy a block of w from `column` and `depth` along k on."""
        if n_rows:
            T.ptx[COPY.format(2 + len(place))](
                address(stage + g.a_tile.size), T.address_of(w_map), depth, column, *place, full
            )
        else:
            for i in T.unroll(config.block_n // PANEL):
                T.ptx[COPY.format(2 + len(place))](
                    address(stage + g.a_tile.size + i * panel_bytes),
                    T.address_of(w_map),
                    column + i * PANEL,
                    depth,
                    *place,
                    full,
                )

    @T.inline
    def produce(state, base, a_map, w_map, row, column, first, blocks, place=()):
        matrix = T.meta_var(matrix_row(g, row))
        after = T.meta_var(lambda index: index if matrix is None else matrix + index)
        for block in T.serial(blocks):
            full = barrier(base, state[0], 0)
            stage = base + state[0] * frame.stage_bytes
            T.cuda.mbarrier_wait(barrier(base, state[0], 1), state[1] ^ 1)
            T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](full, T.uint32(g.stage_bytes))
            depth = T.meta_var((first + block) * config.block_k)
            T.ptx[COPY.format(2)](address(stage), T.address_of(a_map), depth, row, full)
            if n_rows:
                copy_w(stage, w_map, depth, after(column), place, full)
            else:
                copy_w(stage, w_map, after(depth), column, place, full)
            advance(state)

    @T.inline
    def release(state, base, thread):
        if thread % 32 == 0:
            T.ptx["mbarrier.arrive.shared::cta.b64"](barrier(base, state[2], 1), T.uint32(1))

    @T.inline
    def consume(acc, state, base, thread, own_set, tile, blocks, meanwhile=None):
        """acc = the product of the `tile`-th tile of a set; state[2] is the stage whose products are under way.

        `meanwhile()`, if given, runs beside the first products.
        """
        if sets == 2:
            T.cuda.mbarrier_wait(barrier(base, own_set, 2), (tile + own_set + 1) % 2)
        warp = uniform_warp(thread)
        a_start = base + start.a(warp)
        w_start = base + start.w(warp)
        for block in T.serial(blocks):
            T.cuda.mbarrier_wait(barrier(base, state[0], 0), state[1])
            if writers > 0:
                T.ptx["fence.proxy.async.shared::cta"]()  # wgmma reads through the async proxy what threads wrote
            multiply(acc, a_start + state[0] * frame.stage_bytes, w_start + state[0] * frame.stage_bytes, block > 0)
            if meanwhile is not None:
                if block == 0:
                    meanwhile()
            if block > 0:
                T.ptx["wgmma.wait_group.sync.aligned"](1)
                release(state, base, thread)
            state[2] = state[0]
            advance(state)
        if sets == 2:
            if thread % 32 == 0:
                T.ptx["mbarrier.arrive.shared::cta.b64"](barrier(base, 1 - own_set, 2), T.uint32(1))
        T.ptx["wgmma.wait_group.sync.aligned"](0)
        pin_accumulators(acc, g)
        release(state, base, thread)

    @T.inline
    def pass_by(state, base, thread, blocks):
        """Free the stages of a tile as they arrive, in a warpgroup that multiplies nothing of it; for one set."""
        for _ in T.serial(blocks):
            T.cuda.mbarrier_wait(barrier(base, state[0], 0), state[1])
            state[2] = state[0]
            release(state, base, thread)
            advance(state)

    @T.inline
    def skip(state, blocks):
        """Skip the stages of blocks of k that belong to another set of warps."""
        place = state[0] + blocks
        state[0] = place % stages
        state[1] = state[1] ^ (place // stages % 2)

    return SimpleNamespace(
        state=state,
        initialize=initialize,
        produce=produce,
        consume=consume,
        pass_by=pass_by,
        skip=skip,
        barrier=barrier,
        advance=advance,
        copy_w=copy_w,
    )


def tile_loops(part: Part, frame: GemmGeometry, grid: int):
    """Functions that take a CTA's tiles of a part in turn: `produce` copies what they need, `consume` computes them.

    `first` is a CTA's first tile, counted within the part; the next ones follow at distances of `grid`.  `frame` is the
    geometry that places stages, barriers and staging memory.
    """
    g, stages, finish = part.g, pipeline(part.g, frame=frame), epilogue(part.g)
    config, sets = g.config, g.config.sets
    has_row_norm = g.problem.row_norm is not None

    def place_in_frame(thread):
        """Bytes from where the epilogue of `g` alone would stage a warp's rows to the warp's place in the frame.

        No warp waits for another one, so beside this tile's epilogue another warp may be in that of a wider tile.
        """
        if frame is g:
            return 0
        return frame.staging_offset - g.staging_offset + thread // 32 * (frame.staging_bytes - g.staging_bytes)

    @T.inline
    def produce(state, base, a_map, w_map, first, tiles):
        for i in T.serial(tiles):
            tile = T.meta_var(tile_of(g, first + i * grid, part.strips))
            row = T.meta_var(row_of(g, part.first + tile[0]))
            column = T.meta_var(tile[1] * config.block_n)
            stages.produce(state, base, a_map, w_map, row, column, 0, g.k_blocks)

    @T.inline
    def consume(acc, state, base, thread, own_set, operands, out, statistics, first, tiles):
        row_words = T.alloc_local([max(finish.row_size, 1)], "uint32")
        own_thread = T.meta_var(thread % (32 * config.warps))
        if has_row_norm:
            kept = T.alloc_local([finish.kept_size], "float32")
            normed = base + g.row_norm_offset + thread // 32 * g.row_norm_bytes
        else:
            kept = T.meta_var(None)
            normed = T.meta_var(None)
        stages.skip(state, own_set * g.k_blocks)
        for i in T.serial((tiles + (sets - 1) - own_set) // sets):
            tile = T.meta_var(tile_of(g, first + (i * sets + own_set) * grid, part.strips))
            row = row_of(g, part.first + tile[0])
            column = tile[1] * config.block_n
            finish.begin(row_words, operands, own_thread, row, column, kept, normed)
            if has_row_norm:
                meanwhile = T.meta_var(lambda: finish.meanwhile(operands, own_thread, row, kept, normed))
            else:
                meanwhile = T.meta_var(None)
            stages.consume(acc, state, base, own_thread, own_set, i, g.k_blocks, meanwhile)
            staging = base + own_set * (config.warps * g.staging_bytes) + place_in_frame(thread)
            finish.store(acc, staging, own_thread, row_words, operands, out, row, column, statistics, kept, normed)
            stages.skip(state, (sets - 1) * g.k_blocks)

    return SimpleNamespace(produce=produce, consume=consume)


def tma_kernel(problem: GemmProblem, config: GemmConfig, name: str, gpu: GPU) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, `problem.operands`, out, and statistics if the problem has them."""
    g = GemmGeometry(problem, config)
    grid = grid_size(g, gpu)
    head, *rest = parts(g, grid)
    wide, stages = tile_loops(head, g, grid), pipeline(g)
    tail, tail_g = (rest[0], rest[0].g) if rest else (None, None)
    if tail is not None:
        narrow = tile_loops(tail, g, grid)
    set_threads, sets = 32 * config.warps, config.sets
    registers = consumer_registers(g.threads, g.ctas_per_multiprocessor)
    trades_registers = registers > even_registers(g.threads, g.ctas_per_multiprocessor)

    @T.jit(private=True)
    def kernel(
        a_handle: T.handle,
        w_handle: T.handle,
        handle0: T.Optional(T.handle),
        handle1: T.Optional(T.handle),
        handle2: T.Optional(T.handle),
        handle3: T.Optional(T.handle),
        handle4: T.Optional(T.handle),
        handle5: T.Optional(T.handle),
        out_handle: T.handle,
        statistics_handle: T.Optional(T.handle),
    ):
        a = T.match_buffer(a_handle, (problem.m, problem.k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        operands = T.meta_var(match_operands((handle0, handle1, handle2, handle3, handle4, handle5), problem.operands))
        out = T.match_buffer(out_handle, (problem.m, problem.n), problem.dtype, align=16)
        statistics = T.meta_var(match_optional("statistics", statistics_handle, *problem.outputs[-1], align=16))
        maps = T.meta_var(tensor_maps(g, a, w, tail_g))
        a_map, w_map = maps[:2]

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([grid])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024))
        state = T.meta_var(stages.state())
        stages.initialize(base, thread, maps)
        T.ptx["griddepcontrol.wait"]()
        tiles = (head.tiles + grid - 1 - cta) // grid
        if tail is not None:
            first = cta + tiles * grid - head.tiles  # of the tail's tiles: CTAs go on where they are in the last wave
            tail_tiles = (tail.tiles + grid - 1 - first) // grid
        if thread >= sets * set_threads:
            if trades_registers:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
            if thread == sets * set_threads:
                wide.produce(state, base, a_map, w_map, cta, tiles)
                if tail is not None:
                    narrow.produce(state, base, a_map, maps[-1], first, tail_tiles)
        else:
            if trades_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](registers)
            acc = T.alloc_local([4 * g.row_tiles * g.col_tiles], "float32")
            own_set = thread // set_threads
            wide.consume(acc, state, base, thread, own_set, operands, out, statistics, cta, tiles)
            if tail is not None:
                narrow.consume(acc, state, base, thread, own_set, operands, out, statistics, first, tail_tiles)

    absent = [f"handle{i}" for i in range(len(problem.operands), 6)]
    absent += ["statistics_handle"] * (not problem.statistics)
    return finished(kernel, f"{name}_{config.symbol}", absent, fills=True, waits=True)
