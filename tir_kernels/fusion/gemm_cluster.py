"""The CUDA kernel of a matrix product of few tiles and a deep k: the splits of a tile are a cluster of CTAs (sm_90a).

Each CTA multiplies its range of k as `gemm_tma` does, and sends the sums of each row to the shared memory of the CTA
that finishes it: that one adds them in the order of the splits, applies the steps and stores.  No sum goes through
global memory, no CTA waits for one that does it all, and none for more than its own rows.
"""

import functools
from types import SimpleNamespace

import tvm
from tvm.script import tirx as T

from tir_kernels import cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.attention.cuda_tile import address
from tir_kernels.dependent_launch import FILLS_MULTIPROCESSORS
from tir_kernels.fusion.gemm_epilogue import Words
from tir_kernels.fusion.gemm_geometry import BARRIER_BYTES, FLOAT_BYTES, GemmConfig, GemmGeometry
from tir_kernels.fusion.gemm_registers import PRODUCER_REGISTERS, PRODUCER_THREADS, consumer_registers, even_registers
from tir_kernels.fusion.gemm_tile import tile_of
from tir_kernels.fusion.gemm_tma import boxes, pipeline, tensor_map_fields
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.fusion.steps_cuda import VECTOR, match_operands, step_functions, store_vector


def shared_sums(g: GemmGeometry):
    """A CTA's sums to those who finish their rows, then its own share of the tile at row, column.

    initialize(base, rank, thread)                                 before anyone sends
    begin(row_words, operands, rank, thread, row, column)          operands on their way, before the product
    send(acc, base, rank, thread)
    store(base, row_words, operands, out, rank, thread, row, column)

    Stores to another CTA's shared memory are counted in bytes at a barrier there: who has waited for it has all sums.
    A row's vectors lie there in two halves, as in `gemm_epilogue`.
    """
    problem, splits, passes = g.problem, g.config.splits, g.share_passes
    steps = step_functions(problem.steps, problem.dtype)
    store_values = store_vector(problem.dtype)
    vectors, threads = g.config.block_n // VECTOR, g.threads - PRODUCER_THREADS
    even_rows = g.config.block_m % splits == 0
    arrived = g.place_offset + 2 * g.config.stages * BARRIER_BYTES

    def rows_of(rank):
        return g.share_rows if even_rows else T.min(g.share_rows, g.config.block_m - rank * g.share_rows)

    def exists(at, rank, row, column):
        """Whether the vector `at` of the share is in the tile and in the product."""
        conditions = [at < rows_of(rank) * vectors] * (not even_rows or g.share % threads != 0)
        conditions += [row < problem.m] * g.m_ends + [column < problem.n] * g.n_ends
        return functools.reduce(T.And, conditions) if conditions else True

    def place(rank, thread, i, first_row, first_column):
        """(vector of the share, row, column) of the `i`-th vector of a thread."""
        at = i * threads + thread
        return at, first_row + rank * g.share_rows + at // vectors, first_column + at % vectors * VECTOR

    @T.inline
    def initialize(base, rank, thread):
        if thread == 0:
            T.ptx["mbarrier.init.shared::cta.b64"](address(base + arrived), T.uint32(1))
            T.ptx["fence.mbarrier_init.release.cluster"]()
            T.ptx["mbarrier.arrive.expect_tx.shared::cta.b64"](
                address(base + arrived), T.cast(rows_of(rank) * (splits * g.config.block_n * FLOAT_BYTES), "uint32")
            )

    @T.inline
    def begin(row_words, operands, rank, thread, first_row, first_column):
        for i in T.unroll(passes):
            at, row, column = T.meta_var(place(rank, thread, i, first_row, first_column))
            if exists(at, rank, row, column):
                steps.fetch_rows(Words(row_words, i * steps.row_size), operands, column)
                steps.prefetch_matrices(operands, row, column)

    @T.inline
    def send(acc, base, rank, thread):
        to = T.alloc_local([2], "uint32")  # the sums of a row and the barrier in the shared memory of who finishes it
        lane = T.meta_var(thread % 32)
        half = T.meta_var(lane % 4 // 2 * g.sums_second_half + lane % 2 * 8)
        start = base + g.staging_offset + g.warp_column(thread // 32) * (FLOAT_BYTES // 2) + half
        for m in T.unroll(g.row_tiles):
            for i in T.unroll(2):
                row = g.warp_row(thread // 32) + lane // 4 + m * g.row_tile_step + 8 * i
                owner = T.cast(row // g.share_rows, "uint32")
                slot = rank * g.share_rows + row % g.share_rows
                T.ptx["mapa.shared::cluster.u32"](to[0], address(start + slot * g.sums_pitch), owner)
                T.ptx["mapa.shared::cluster.u32"](to[1], address(base + arrived), owner)
                for n in T.unroll(g.col_tiles):
                    ci = T.meta_var((m * g.col_tiles + n) * 4 + 2 * i)
                    T.ptx["st_async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"](
                        to[0] + T.uint32(n * 16), acc[ci], acc[ci + 1], to[1]
                    )

    @T.inline
    def store(base, row_words, operands, out, rank, thread, first_row, first_column):
        words = T.alloc_local([max(passes * steps.matrix_size, 1)], "uint32")
        sums = T.alloc_local([splits * VECTOR], "float32")
        values = T.alloc_local([VECTOR], "float32")
        for i in T.unroll(passes):
            at, row, column = T.meta_var(place(rank, thread, i, first_row, first_column))
            if exists(at, rank, row, column):
                steps.fetch_matrices(words, i * steps.matrix_size, operands, row, column)
        T.cuda.mbarrier_wait(address(base + arrived), 0)
        for i in T.unroll(passes):
            at, row, column = T.meta_var(place(rank, thread, i, first_row, first_column))
            if exists(at, rank, row, column):
                start = base + g.staging_offset + at // vectors * g.sums_pitch + at % vectors * 16
                for s in T.unroll(splits):
                    for half in T.unroll(2):
                        wi = T.meta_var(s * VECTOR + half * 4)
                        from_split = T.meta_var(s * g.share_rows * g.sums_pitch + half * g.sums_second_half)
                        T.ptx["ld.shared.v4.f32"](
                            sums[wi], sums[wi + 1], sums[wi + 2], sums[wi + 3], address(start + from_split)
                        )
                for c in T.unroll(VECTOR):
                    values[c] = sums[c]
                    for s in T.unroll(1, splits):
                        values[c] = values[c] + sums[s * VECTOR + c]
                steps.apply(values, Words(row_words, i * steps.row_size), words, i * steps.matrix_size)
                store_values(lambda c: out.ptr_to([row, column + c]), values)

    return SimpleNamespace(initialize=initialize, begin=begin, send=send, store=store, row_size=passes * steps.row_size)


def cluster_kernel(problem: GemmProblem, config: GemmConfig, name: str) -> tvm.tirx.PrimFunc:
    """Arguments: a, w, the steps' operands, out."""
    g = GemmGeometry(problem, config)
    stages, sums = pipeline(g), shared_sums(g)
    consumers, splits, shapes = g.threads - PRODUCER_THREADS, config.splits, problem.operand_shapes
    even = g.k_blocks % splits == 0
    registers = consumer_registers(g.threads, g.min_blocks_per_sm)
    trades_registers = registers > even_registers(g.threads, g.min_blocks_per_sm)
    a_fields = tensor_map_fields((problem.m, problem.k), boxes(g)["a"])
    w_fields = tensor_map_fields(problem.w_shape, boxes(g)["w"])

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
    ):
        a = T.match_buffer(a_handle, (problem.m, problem.k), problem.dtype, align=16)
        w = T.match_buffer(w_handle, problem.w_shape, problem.dtype, align=16)
        operands = T.meta_var(
            match_operands((handle0, handle1, handle2, handle3, handle4, handle5), shapes, problem.dtype)
        )
        out = T.match_buffer(out_handle, (problem.m, problem.n), problem.dtype, align=16)
        a_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        w_map: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed("runtime.cuTensorMapEncodeTiled", a_map, problem.dtype, 2, a.data, *a_fields)
        T.call_packed("runtime.cuTensorMapEncodeTiled", w_map, problem.dtype, 2, w.data, *w_fields)

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.min_blocks_per_sm})
        cta = T.cta_id([g.ctas])
        rank = T.cta_id_in_cluster([splits])
        thread = T.thread_id([g.threads])
        shared = T.alloc_buffer((g.shared_bytes,), "uint8", scope="shared.dyn", align=1024)
        base = T.cast(T.cuda.cvta_generic_to_shared(shared.ptr_to([0])), "int32")
        state = T.alloc_local([3], "int32")
        state[0] = 0
        state[1] = 0
        if thread == 0:
            stages.initialize(base)
        sums.initialize(base, rank, thread)
        T.ptx["barrier.cluster.arrive.relaxed"]()
        T.cuda.cta_sync()
        tile = T.meta_var(tile_of(g, cta))
        row = tile[0] * config.block_m
        column = tile[1] * config.block_n
        first = rank * g.blocks_per_split
        blocks = g.blocks_per_split if even else T.min(g.blocks_per_split, g.k_blocks - first)
        if thread >= consumers:
            if trades_registers:
                T.ptx["setmaxnreg.dec.sync.aligned.u32"](PRODUCER_REGISTERS)
            if thread == consumers:
                stages.produce(state, base, a_map, w_map, row, column, first, blocks)
            T.cuda.warp_sync()
            T.ptx["barrier.cluster.wait.acquire"]()
        else:
            if trades_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](registers)
            acc = T.alloc_local([4 * g.row_tiles * g.col_tiles], "float32")
            row_words = T.alloc_local([max(sums.row_size, 1)], "uint32")
            sums.begin(row_words, operands, rank, thread, row, column)
            stages.consume(acc, state, base, thread, 0, 0, blocks)
            T.ptx["barrier.cluster.wait.acquire"]()  # all have initialized their barriers
            sums.send(acc, base, rank, thread)
            sums.store(base, row_words, operands, out, rank, thread, row, column)

    absent = [f"handle{i}" for i in range(len(shapes), 6)]
    return kernel.specialize(**dict.fromkeys(absent)).with_attrs(
        {
            "global_symbol": f"{name}_{config.symbol}",
            "tirx.noalias": True,
            "op_pattern": 8,
            "tirx.is_scheduled": True,
            FILLS_MULTIPROCESSORS: True,
        }
    )
