"""Device code of the CUDA kernel of two products: the first one's results, and the second product that reads them."""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import CHUNK, CHUNK_BYTES, MMA_ROWS
from tir_kernels.fusion.gemm.finish.epilogue import epilogue
from tir_kernels.fusion.gemm.tile import tile_copy, warp_products
from tir_kernels.fusion.mlp.geometry import BLOCK_K, MlpGeometry
from tir_kernels.fusion.steps import VECTOR, Words, load_words, step_functions

PAIRS = VECTOR // 2  # of neighbouring accumulators: two rows of two n8 tiles are worked on as one vector


def inner_results(g: MlpGeometry):
    """Functions that apply the first product's steps to a tile of accumulators and write it to shared memory.

    fetch(row_words, operands, thread, column)              load operands that are vectors, for a tile at column
    store(acc, base, thread, row_words, operands, row, column)      apply the steps and write the results

    Results are written in the layout of an mma: two neighbours of a row in one lane are one word of the tile that the
    second product's ldmatrix reads, and a warp's 32 words lie in 32 different banks.
    """
    first, problem, tile = g.first, g.problem.first, g.inner_tile
    steps = step_functions(problem.steps, problem.dtype)
    pack = "cvt.rn.bf16x2.f32" if problem.dtype == "bfloat16" else "cvt.rn.f16x2.f32"
    row_tiles, pairs = first.row_tiles, first.col_tiles // 2
    load_vectors, load_matrices = (load_words(problem.steps, kind) for kind in ("row", "matrix"))
    columns_end = g.inner_tile.dim != problem.n

    def column_exists(column):
        return column < problem.n if columns_end else True

    def exists(row, column):
        return T.And(row < problem.m, column_exists(column)) if first.m_ends else column_exists(column)

    def column_of(first_column, thread, n):
        """The first of a lane's two columns in its n8 tile number `n`."""
        return first_column + first.warp_column(thread // 32) + n * CHUNK + thread % 4 * 2

    @T.inline
    def fetch(row_words, operands, thread, first_column):
        for pair in T.unroll(pairs):
            for i in T.unroll(2):
                column = T.meta_var(column_of(first_column, thread, 2 * pair + i))
                if column_exists(column):
                    load_vectors(row_words, pair * steps.row_size + i, operands, lambda x: x.ptr_to([column]))
        for i in T.unroll(pairs * steps.row_size // 2):  # the lane's other row has the same words
            row_words[i // 2 * 4 + i % 2 + 2] = row_words[i // 2 * 4 + i % 2]

    @T.inline
    def fetch_matrices(words, operands, row, column):
        for i in T.unroll(PAIRS):
            at_row = T.meta_var(row + i // 2 * 8)
            at_column = T.meta_var(column + i % 2 * CHUNK)
            if exists(at_row, at_column):
                load_matrices(words, i, operands, lambda x: x.ptr_to([at_row, at_column]))

    @T.inline
    def store(acc, base, thread, row_words, operands, first_row, first_column):
        values = T.alloc_local([VECTOR], "float32")
        words = T.alloc_local([max(steps.matrix_size, 1)], "uint32")
        packed = T.alloc_local([1], "uint32")
        lane_row = T.meta_var(first.warp_row(thread // 32) + thread % 32 // 4)
        lane_address = base + g.inner_offset + lane_row * tile.pitch + thread % 4 * 4
        chunk = (first_column + first.warp_column(thread // 32)) // CHUNK
        for m in T.unroll(row_tiles):
            for pair in T.unroll(pairs):
                row = T.meta_var(first_row + lane_row + m * MMA_ROWS)
                column = T.meta_var(column_of(first_column, thread, 2 * pair))
                fetch_matrices(words, operands, row, column)
                for i in T.unroll(VECTOR):
                    values[i] = acc[(m * first.col_tiles + 2 * pair + i // 2 % 2) * 4 + i // 4 * 2 + i % 2]
                steps.apply(values, Words(row_words, pair * steps.row_size), words, 0)
                for i in T.unroll(PAIRS):
                    T.ptx[pack](packed[0], values[2 * i + 1], values[2 * i])
                    if columns_end:
                        packed[0] = T.Select(column_exists(column + i % 2 * CHUNK), packed[0], T.uint32(0))
                    swizzled = T.meta_var((chunk + 2 * pair + i % 2) ^ tile.swizzle(thread % 32 // 4))
                    T.ptx["st.shared.b32"](
                        address(lane_address + (m * MMA_ROWS + i // 2 * 8) * tile.pitch + swizzled * CHUNK_BYTES),
                        packed[0],
                    )

    return SimpleNamespace(fetch=fetch, store=store, row_size=pairs * steps.row_size)


def second_product(g: MlpGeometry):
    """Functions that compute the second product from the tile of the first one's results, with its steps and stores.

    start(base, thread, w, column, tiles)                 start to copy the first blocks of w
    begin(row_words, operands, thread, row, column)       start to load the operands of the first tile
    walk(acc, base, thread, w, row_words, operands, out, row, column, tiles)     compute `tiles` tiles, from column on

    Blocks of w follow one another through the stages from tile to tile; the first `wait` of `walk` is also where all
    warps see the results of the first product.
    """
    second, problem, config = g.second, g.problem.second, g.config
    copy_w = tile_copy(g.w_tile, problem.n if second.n_ends else None, problem.k if second.k_ends else None)
    products, finish = warp_products(second), epilogue(second)
    stages, steps, stage_bytes, k_blocks = config.stages, second.steps, g.w_tile.size, second.k_blocks
    acc_size = 4 * second.row_tiles * second.col_tiles

    @T.inline
    def copy(stage, thread, w, column, block):
        copy_w(stage, thread, w, column + block // k_blocks * config.block_n, block % k_blocks * BLOCK_K)

    @T.inline
    def start(base, thread, w, column, tiles):
        for i in T.unroll(stages - 1):
            if i < tiles * k_blocks:
                copy(base + i * stage_bytes, thread, w, column, i)
            T.ptx["cp.async.commit_group"]()

    @T.inline
    def wait(pending):
        T.ptx["cp.async.wait_group"](pending)
        T.cuda.cta_sync()

    @T.inline
    def clear(acc):
        for i in T.unroll(acc_size):
            acc[i] = T.float32(0)

    @T.inline
    def walk(acc, base, thread, w, row_words, operands, out, row, column, tiles):
        a_fragments = T.alloc_local([2 * 4 * second.row_tiles], "uint32")
        w_fragments = T.alloc_local([2 * 2 * second.col_tiles], "uint32")
        read_at = T.alloc_local([1], "int32")  # offset of the stage that is multiplied, in bytes
        write_at = T.alloc_local([1], "int32")
        blocks = tiles * k_blocks
        a_lane = products.a_lane(base + g.inner_offset, thread // 32, thread % 32)
        w_lane = products.w_lane(base, thread // 32, thread % 32)
        clear(acc)
        read_at[0] = 0
        write_at[0] = (stages - 1) * stage_bytes
        wait(stages - 2)
        products.load(a_fragments, w_fragments, 0, a_lane, w_lane, 0)
        for block in T.serial(blocks):
            for step in T.unroll(steps):
                if step == steps - 1:
                    write_at[0] = read_at[0]
                    read_at[0] = T.Select(read_at[0] == (stages - 1) * stage_bytes, 0, read_at[0] + stage_bytes)
                    wait(stages - 2)
                products.load(
                    a_fragments,
                    w_fragments,
                    (step + 1) % 2,
                    a_lane + (block + (step + 1) // steps) % k_blocks * (BLOCK_K // CHUNK * CHUNK_BYTES),
                    w_lane + read_at[0],
                    (step + 1) % steps,
                )
                if step == 0:
                    if block + (stages - 1) < blocks:
                        copy(base + write_at[0], thread, w, column, block + (stages - 1))
                    T.ptx["cp.async.commit_group"]()
                products.multiply(acc, a_fragments, w_fragments, step % 2)
            if block % k_blocks == k_blocks - 1:
                tile_column = T.meta_var(column + block // k_blocks * config.block_n)
                finish.store(acc, base, thread, row_words, operands, out, row, tile_column)
                clear(acc)
                if block + 1 < blocks:
                    finish.begin(row_words, operands, thread, row, tile_column + config.block_n)

    return SimpleNamespace(start=start, begin=finish.begin, walk=walk, row_size=finish.row_size)
