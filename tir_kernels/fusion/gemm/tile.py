"""Device code of the CUDA matrix-product kernels: the copies, fragments and products of one CTA's tile.

The functions are inlined into a kernel while it is parsed.  Shared-memory addresses are int32 byte addresses of the
shared window; loops over compile-time extents are unrolled, so accumulators and fragments stay in registers.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import LDMATRIX, LDMATRIX_TRANS, SHORT, address
from tir_kernels.cuda.shared_tiles import CHUNK, CHUNK_BYTES, MMA_ROWS, SharedTile
from tir_kernels.fusion.gemm.products.float32 import float32_warp_products
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry


def tile_of(g: GemmGeometry, cta, m_tiles: int | None = None):
    """(m tile, n tile) of a CTA: down the rows of a group of `group_m`, then on to the next column.

    `m_tiles` are those to be taken, where they are not all.
    """
    tile, m_tiles = cta // g.config.splits, m_tiles or g.m_tiles
    group = min(g.group_m, m_tiles)
    first = tile // (group * g.n_tiles) * group
    rows = group if m_tiles % group == 0 else T.min(group, m_tiles - first)
    inside = tile % (group * g.n_tiles)
    return first + inside % rows, inside // rows


def row_of(g: GemmGeometry, m_tile):
    """The first row of a tile along m.  The last tile of a part of a batch overlaps with the one before."""
    problem, block_m = g.problem, g.config.block_m
    if problem.batch == 1:
        return m_tile * block_m
    first = m_tile % g.part_tiles * block_m
    if problem.rows % block_m:
        first = T.min(first, problem.rows - block_m)
    return m_tile // g.part_tiles * problem.rows + first


def matrix_row(g: GemmGeometry, row):
    """The first row of the matrix, among those of w, by which row `row` of a is multiplied; None if w is one."""
    if g.problem.matrices == 1:
        return None
    return row // g.problem.rows % g.problem.matrices * (g.problem.w_shape[0] // g.problem.matrices)


def block_copy(g: GemmGeometry):
    """`copy(stage, thread, a, w, row, column, block)`: start copying block `block` of k for the tile at row, column.

    Elements past the end of a or w become zeros.  The caller commits and waits.
    """
    problem = g.problem
    m_end, n_end, k_end = (
        size if ends else None
        for size, ends in ((problem.m, g.m_ends), (problem.w_columns, g.n_ends), (problem.k, g.k_ends))
    )
    copy_a = tile_copy(g.a_tile, m_end, k_end)
    if n_end is not None and problem.w_layout == "nk":
        n_end *= problem.matrices  # what follows a matrix is columns that are not stored
    copy_w = tile_copy(g.w_tile, n_end, k_end) if problem.w_layout == "nk" else tile_copy(g.w_tile, k_end, n_end)

    @T.inline
    def copy(stage, thread, a, w, row, column, block):
        copy_a(stage, thread, a, row, block * g.config.block_k)
        matrix = T.meta_var(matrix_row(g, row))
        after = T.meta_var(lambda first: first if matrix is None else matrix + first)
        if problem.w_layout == "nk":
            copy_w(stage + g.a_tile.size, thread, w, after(column), block * g.config.block_k)
        else:
            copy_w(stage + g.a_tile.size, thread, w, after(block * g.config.block_k), column)

    return copy


def tile_copy(tile: SharedTile, end_row, end_column):
    """`copy(dst, thread, source, row, column)`: start copying `source`, from (row, column) on, into `tile`.

    `end_row` and `end_column` are the ends of `source`, None if no tile extends past them.  Elements past the ends
    become zeros without a read.  Reading the last row in their stead would make all CTAs wait for one slice of the L2
    cache.
    """

    def exists(row, column):
        conditions = [index < end for index, end in ((row, end_row), (column, end_column)) if end is not None]
        return T.And(*conditions) if len(conditions) == 2 else conditions[0]

    @T.inline
    def copy_chunk(dst, source, row, column):
        if end_row is None and end_column is None:
            T.ptx["cp.async.cg.shared.global.L2::128B"](address(dst), source.ptr_to([row, column]), CHUNK_BYTES)
        else:
            T.ptx["cp.async.cg.shared.global.L2::128B"](
                address(dst),
                source.ptr_to([row, column]),
                CHUNK_BYTES,
                T.Select(exists(row, column), T.uint32(CHUNK_BYTES), T.uint32(0)),
            )

    @T.inline
    def copy(dst, thread, source, first_row, first_column):
        row = T.meta_var(thread // tile.threads_per_row)
        column = T.meta_var(first_column + thread % tile.threads_per_row * tile.chunk)
        base = dst + tile.offset(row, thread % tile.threads_per_row)
        for i in T.unroll(tile.passes):
            if tile.rows_per_pass > tile.rows:
                if row < tile.rows:
                    copy_chunk(base, source, first_row + row, column)
            else:
                copy_chunk(tile.pass_offset(base, i), source, first_row + row + i * tile.rows_per_pass, column)

    return copy


def warp_products(g: GemmGeometry):
    """Functions that load fragments and multiply them, and the lane addresses that they start from.

    load(a, w, set, a_lane, w_lane, step)     load a set of fragments from shared memory
    multiply(acc, a, w, set, shared)          add the product of a set of fragments to acc

    There are two sets of fragments: one is loaded while the other is multiplied.  `shared` is any shared
    address, which float32 needs.
    """
    if g.problem.dtype == "float32":
        return float32_warp_products(g)
    row_tiles, col_tiles, a_tile, w_tile = g.row_tiles, g.col_tiles, g.a_tile, g.w_tile
    mma_instruction = "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32".format(SHORT[g.problem.dtype])
    n_rows = g.problem.w_layout == "nk"

    def a_lane(start, warp, lane):
        """Address of the row that this lane gives to ldmatrix for its warp's first 16×16 tile of a."""
        return start + a_tile.offset(warp // g.config.warps_n * g.warp_m + lane % 16, lane // 16)

    def w_lane(start, warp, lane):
        """Address of the row that this lane gives to ldmatrix for two n8 tiles of w, with rows along n ("nk") or k."""
        first = warp % g.config.warps_n * g.warp_n
        if n_rows:
            return start + w_tile.offset(first + lane // 16 * 8 + lane % 8, lane // 8 % 2)
        return start + w_tile.offset(lane % 16, first // CHUNK + lane // 16)

    def w_address(lane_address, step, pair):
        if n_rows:
            return w_tile.step(lane_address, 2 * step) + pair * MMA_ROWS * w_tile.pitch
        return w_tile.step(lane_address, 2 * pair) + step * MMA_ROWS * w_tile.pitch

    @T.inline
    def load(a, w, fragment_set, a_address, w_address_of_lane, step):
        for m in T.unroll(row_tiles):
            ai = T.meta_var((fragment_set * row_tiles + m) * 4)
            T.ptx[LDMATRIX](
                a[ai], a[ai + 1], a[ai + 2], a[ai + 3],
                address(a_tile.step(a_address, 2 * step) + m * MMA_ROWS * a_tile.pitch),
            )  # fmt: skip
        for pair in T.unroll(col_tiles // 2):
            wi = T.meta_var((fragment_set * col_tiles + 2 * pair) * 2)
            T.ptx[LDMATRIX if n_rows else LDMATRIX_TRANS](
                w[wi], w[wi + 1], w[wi + 2], w[wi + 3], address(w_address(w_address_of_lane, step, pair))
            )

    @T.inline
    def multiply(acc, a, w, fragment_set, shared=None):
        for n in T.unroll(col_tiles):
            for i in T.unroll(row_tiles):
                # Back and forth, so that neighbouring products share a fragment.
                m = T.meta_var(T.Select(n % 2 == 0, i, row_tiles - 1 - i))
                ci = T.meta_var((m * col_tiles + n) * 4)
                ai = T.meta_var((fragment_set * row_tiles + m) * 4)
                wi = T.meta_var((fragment_set * col_tiles + n) * 2)
                T.ptx[mma_instruction](
                    acc[ci], acc[ci + 1], acc[ci + 2], acc[ci + 3],
                    a[ai], a[ai + 1], a[ai + 2], a[ai + 3], w[wi], w[wi + 1],
                    acc[ci], acc[ci + 1], acc[ci + 2], acc[ci + 3],
                )  # fmt: skip

    return SimpleNamespace(load=load, multiply=multiply, a_lane=a_lane, w_lane=w_lane)


def tile_product(g: GemmGeometry):
    """`product(acc, base, thread, a, w, row, column, begin, end)`: set acc to the product of a tile, over a range of k.

    The tile begins at row, column, and the range is the blocks begin … end - 1 of k.  Blocks are copied `stages - 1`
    ahead; the fragments of a step are loaded while the step before is multiplied, across blocks as well.
    `meanwhile()`, if given, runs when the first copies are under way.  At the end no copy is under way, but other warps
    may still read shared memory.
    """
    copy, products = block_copy(g), warp_products(g)
    stages, steps, stage_bytes = g.config.stages, g.steps, g.stage_bytes
    a_words, w_words = 2 * 4 * g.row_tiles, 2 * 2 * g.col_tiles

    @T.inline
    def wait(pending):
        T.ptx["cp.async.wait_group"](pending)
        T.cuda.cta_sync()

    @T.inline
    def product(acc, base, thread, a, w, row, column, begin, end, meanwhile=None):
        a_fragments = T.alloc_local([a_words], "uint32")
        w_fragments = T.alloc_local([w_words], "uint32")
        read_at = T.alloc_local([1], "int32")  # offset of the stage that is multiplied, in bytes
        write_at = T.alloc_local([1], "int32")
        for i in T.unroll(4 * g.row_tiles * g.col_tiles):
            acc[i] = T.float32(0)
        for i in T.unroll(stages - 1):
            if begin + i < end:
                copy(base + i * stage_bytes, thread, a, w, row, column, begin + i)
            T.ptx["cp.async.commit_group"]()
        if meanwhile is not None:
            meanwhile()
        a_lane = products.a_lane(base, thread // 32, thread % 32)
        w_lane = products.w_lane(base + g.a_tile.size, thread // 32, thread % 32)
        read_at[0] = 0
        write_at[0] = (stages - 1) * stage_bytes
        wait(stages - 2)
        products.load(a_fragments, w_fragments, 0, a_lane, w_lane, 0)
        for block in T.serial(begin, end):
            for step in T.unroll(steps):
                if step == steps - 1:
                    write_at[0] = read_at[0]
                    read_at[0] = T.Select(read_at[0] == (stages - 1) * stage_bytes, 0, read_at[0] + stage_bytes)
                    wait(stages - 2)
                products.load(
                    a_fragments,
                    w_fragments,
                    (step + 1) % 2,
                    a_lane + read_at[0],
                    w_lane + read_at[0],
                    (step + 1) % steps,
                )
                if step == 0:
                    if block + (stages - 1) < end:
                        copy(base + write_at[0], thread, a, w, row, column, block + (stages - 1))
                    T.ptx["cp.async.commit_group"]()
                products.multiply(acc, a_fragments, w_fragments, step % 2, a_lane)

    return product
