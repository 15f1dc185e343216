"""The CUDA kernel of a matrix product with few tiles and a deep k: the splits of a tile are a cluster of CTAs (sm_90a).

Each CTA multiplies its range of k as `gemm/tma.py` does, and leaves the sums in its own shared memory, where the stages
were: it takes no second tile.  Then each CTA takes a share of the tile: it reads all splits' sums of that share from
the others' shared memory, adds them in the order of the splits, applies the steps and stores.  So no sum goes through
global memory, and no single CTA does the whole epilogue while others wait.
"""

from types import SimpleNamespace

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional, shared_memory
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.registers import PRODUCER_REGISTERS, PRODUCER_THREADS, consumer_registers, even_registers
from tir_kernels.fusion.gemm.finish.deferred_norm import norm_columns, row_pairs, statistics_operand
from tir_kernels.fusion.gemm.finish.vector import vector_functions
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.geometry import FLOAT_BYTES, PAIR_BYTES, GemmGeometry
from tir_kernels.fusion.gemm.tile import tile_of
from tir_kernels.fusion.gemm.tma import pipeline, tensor_maps
from tir_kernels.fusion.problem import GemmProblem
from tir_kernels.fusion.steps import VECTOR, Words, match_operands

SUMS_BARRIER = 1  # of the warps that multiply: the stages have been read, and sums may take their place


@T.inline
def cluster_sync():
    """A barrier of the cluster: after it, every CTA can read what any of them wrote before.

    It counts every thread of every CTA of the cluster, including those that copy and those that idle, one by one: warps
    need not be converged.
    """
    T.ptx["barrier.cluster.arrive.release"]()
    T.ptx["barrier.cluster.wait.acquire"]()


@T.inline
def leave_together():
    """A barrier before the end: no CTA ends while another CTA of its cluster reads its shared memory.

    It waits for no stores, since nothing has to become visible.  A thread's reads are over when it arrives, because the
    results that it stored depend on them.
    """
    T.ptx["barrier.cluster.arrive.relaxed"]()
    T.ptx["barrier.cluster.wait.acquire"]()


def shared_sums(g: GemmGeometry):
    """Functions that write a CTA's sums to its shared memory and finish its share of the tile at row, column.

    begin(row_words, operands, base, rank, thread, row, column, kept)     start to load operands, before the product
    write(acc, base, operands, rank, thread, row, kept)                   write the sums, after the product
    store(base, row_words, operands, out, rank, thread, row, column, statistics)      finish, after a `cluster_sync`

    In shared memory a row's vectors lie in two halves, as in `gemm/epilogue.py`, which also explains `kept`.
    """
    splits, passes = g.config.splits, g.share_passes
    vector = vector_functions(g)
    steps, exists = vector.steps, vector.exists
    vectors, threads = g.config.block_n // VECTOR, g.threads - PRODUCER_THREADS
    if g.problem.row_norm is not None:
        pairs = row_pairs(g, g.problem.row_norm, g.normed_rows, threads)
        statistics_place = statistics_operand(g.problem)
    if g.normed_vectors > 0:
        normed_by = norm_columns(g, g.normed_columns, threads)

    def position(rank, thread, i, first_row, first_column):
        """(vector of the tile, row, column) of the `i`-th vector of a thread."""
        at = (rank * passes + i) * threads + thread
        return at, first_row + at // vectors, first_column + at % vectors * VECTOR

    def normed_row(rank, first_row):
        """The i-th row of a CTA's share."""
        return lambda i: first_row + rank * g.normed_rows + i

    @T.inline
    def begin(row_words, operands, base, rank, thread, first_row, first_column, kept=None):
        for i in T.unroll(passes):
            at, row, column = T.meta_var(position(rank, thread, i, first_row, first_column))
            if exists(row, column):
                steps.fetch_rows(Words(row_words, i * steps.row_size), operands, column)
                steps.prefetch_matrices(operands, row, column)
        if g.problem.row_norm is not None:
            pairs.load(kept, operands[statistics_place], thread, normed_row(rank, first_row))
            if g.normed_vectors > 0:
                normed_by.keep(base + g.row_norm_offset, operands, thread, first_column)

    def pair_address(base, thread, i):
        """Shared address of the mean and scale of the row of a thread's `i`-th vector."""
        return base + g.row_norm_offset + g.pairs_offset + (i * threads + thread) // vectors * PAIR_BYTES

    @T.inline
    def write(acc, base, operands, rank, thread, first_row, kept=None):
        lane = T.meta_var(thread % 32)
        row = T.meta_var(g.warp_row(thread // 32) + lane // 4)
        half = T.meta_var(lane % 4 // 2 * g.sums_second_half + lane % 2 * 8)
        start = base + g.staging_offset + row * g.sums_pitch + g.warp_column(thread // 32) * (FLOAT_BYTES // 2) + half
        for m in T.unroll(g.row_tiles):
            for n in T.unroll(g.col_tiles):
                for i in T.unroll(2):
                    ci = T.meta_var((m * g.col_tiles + n) * 4 + 2 * i)
                    down = T.meta_var((m * g.row_tile_step + 8 * i) * g.sums_pitch)
                    T.ptx["st.shared.v2.f32"](address(start + down + n * 16), acc[ci], acc[ci + 1])
        if g.problem.row_norm is not None:
            to = T.meta_var(base + g.row_norm_offset + g.pairs_offset)
            pairs.merge(to, kept, operands[statistics_place], thread, normed_row(rank, first_row))
            if g.normed_vectors > 0:
                T.ptx["cp.async.wait_group"](0)

    @T.inline
    def fetch_matrices(words, at, operands, row, column):
        if g.problem.statistics:  # threads without a vector get here, too
            if exists(row, column):
                steps.fetch_matrices(words, at, operands, row, column)
        else:
            steps.fetch_matrices(words, at, operands, row, column)

    @T.inline
    def store(base, row_words, operands, out, rank, thread, first_row, first_column, statistics=None):
        words = T.alloc_local([max(passes * steps.matrix_size, 1)], "uint32")
        sums = T.alloc_local([splits * VECTOR], "float32")
        values = T.alloc_local([VECTOR], "float32")
        starts = T.alloc_local([splits], "uint32")  # addresses of the splits' sums in the cluster
        for s in T.unroll(splits):
            T.ptx["mapa.shared::cluster.u32"](starts[s], address(base + g.staging_offset), T.uint32(s))
        if g.normed_vectors > 0:
            norm_words = T.alloc_local([normed_by.size], "uint32")
        else:
            norm_words = T.meta_var(None)
        for i in T.unroll(passes):
            at, row, column = T.meta_var(position(rank, thread, i, first_row, first_column))
            if vector.takes_part(row, column):
                fetch_matrices(words, i * steps.matrix_size, operands, row, column)
                if g.normed_vectors > 0:
                    normed_by.fetch(norm_words, base + g.row_norm_offset, column - first_column)
                offset = at // vectors * g.sums_pitch + at % vectors * 16
                for s in T.unroll(splits):
                    for half in T.unroll(2):
                        wi = T.meta_var(s * VECTOR + half * 4)
                        T.ptx["ld.shared::cluster.v4.f32"](
                            sums[wi], sums[wi + 1], sums[wi + 2], sums[wi + 3],
                            starts[s] + address(offset + half * g.sums_second_half),
                        )  # fmt: skip
                for c in T.unroll(VECTOR):
                    values[c] = sums[c]
                    for s in T.unroll(1, splits):
                        values[c] = values[c] + sums[s * VECTOR + c]
                vector.apply(
                    values,
                    Words(row_words, i * steps.row_size),
                    words,
                    i * steps.matrix_size,
                    pair_address(base, thread, i),
                    norm_words,
                )
                if g.problem.statistics:
                    vector.store_measured(values, 1, out, statistics, lambda _: (row, column))
                else:
                    vector.store(values, out, row, column)

    return SimpleNamespace(
        begin=begin,
        write=write,
        store=store,
        row_size=passes * steps.row_size,
        kept_size=pairs.size if g.problem.row_norm is not None else 0,
    )


def cluster_kernel(problem: GemmProblem, config: GemmConfig, name: str) -> tvm.tirx.PrimFunc:
    """The kernel; arguments a, w, `problem.operands`, out, and statistics if the problem has them."""
    g = GemmGeometry(problem, config)
    stages, sums = pipeline(g), shared_sums(g)
    consumers, splits = g.threads - PRODUCER_THREADS, config.splits
    even = g.k_blocks % splits == 0
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
        a_map, w_map = T.meta_var(tensor_maps(g, a, w))

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": g.ctas_per_multiprocessor})
        cta = T.cta_id([g.ctas])
        rank = T.cta_id_in_cluster([splits])
        thread = T.thread_id([g.threads])
        base = T.meta_var(shared_memory(g.shared_bytes, align=1024))
        state = T.meta_var(stages.state())
        stages.initialize(base, thread, (a_map, w_map))
        T.ptx["griddepcontrol.wait"]()
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
            cluster_sync()
            leave_together()
        else:
            if trades_registers:
                T.ptx["setmaxnreg.inc.sync.aligned.u32"](registers)
            acc = T.alloc_local([4 * g.row_tiles * g.col_tiles], "float32")
            row_words = T.alloc_local([max(sums.row_size, 1)], "uint32")
            if problem.row_norm is not None:
                kept = T.alloc_local([sums.kept_size], "float32")
            else:
                kept = T.meta_var(None)
            sums.begin(row_words, operands, base, rank, thread, row, column, kept)
            stages.consume(acc, state, base, thread, 0, 0, blocks)
            T.ptx["bar.sync"](T.uint32(SUMS_BARRIER), T.uint32(consumers))
            sums.write(acc, base, operands, rank, thread, row, kept)
            cluster_sync()
            sums.store(base, row_words, operands, out, rank, thread, row, column, statistics)
            leave_together()

    absent = [f"handle{i}" for i in range(len(problem.operands), 6)]
    absent += ["statistics_handle"] * (not problem.statistics)
    return finished(kernel, f"{name}_{config.symbol}", absent, fills=True, waits=True)
