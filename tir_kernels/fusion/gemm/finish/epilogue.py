"""Device code of the CUDA matrix-product kernels after the product: sums over splits, steps, stores."""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.arrival import arrive as arrive_at
from tir_kernels.cuda.ptx import address
from tir_kernels.cuda.shared_tiles import MMA_ROWS
from tir_kernels.fusion.gemm.finish.deferred_norm import norm_columns, row_pairs, statistics_operand
from tir_kernels.fusion.gemm.finish.gated import gated_products
from tir_kernels.fusion.gemm.finish.in_registers import register_epilogue
from tir_kernels.fusion.gemm.finish.vector import MOST_MEASURED, vector_functions
from tir_kernels.fusion.gemm.sizes.geometry import FLOAT_BYTES, PAIR_BYTES, GemmGeometry
from tir_kernels.fusion.steps import VECTOR, Words

LOADS_AT_ONCE = 16  # 16-byte loads of a thread that are under way together


def arrival(base_offset: int):
    """`arrive(last, arrivals, index, expected, thread, base)`: last[0] = 1 in the last of `expected` CTAs, else 0.

    `base` is the address of the CTA's shared memory, where 4 bytes at offset `base_offset` are used.
    """

    @T.inline
    def arrive(last, arrivals, index, expected, thread, base):
        most = T.meta_var(T.uint32(expected - 1))
        is_last = T.meta_var(lambda before: T.Select(before == most, T.uint32(1), T.uint32(0)))
        arrive_at(last, arrivals.ptr_to([index]), most, is_last, thread, base + base_offset)

    return arrive


def split_functions(g: GemmGeometry):
    """`write` and `add`, for partial sums of `partials_shape`, if k is split among CTAs."""
    tiles, splits = g.row_tiles * g.col_tiles, g.config.splits
    at_once = 1
    while at_once * 2 * splits <= LOADS_AT_ONCE and tiles % (at_once * 2) == 0:
        at_once *= 2

    @T.inline
    def write(partials, slot, thread, acc):
        for i in T.unroll(tiles):
            T.ptx["st.global.v4.f32"](
                partials.ptr_to([slot, i, thread, 0]), acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]
            )

    @T.inline
    def add(partials, first_slot, thread, acc):
        """Set acc to the sum of all splits, in their order: the result does not depend on which CTA came last."""
        words = T.alloc_local([at_once * splits * 4], "float32")
        for first in T.unroll(tiles // at_once):
            for i in T.unroll(at_once):
                for s in T.unroll(splits):
                    wi = T.meta_var((i * splits + s) * 4)
                    T.ptx["ld.global.cg.v4.f32"](
                        words[wi], words[wi + 1], words[wi + 2], words[wi + 3],
                        partials.ptr_to([first_slot + s, first * at_once + i, thread, 0]),
                    )  # fmt: skip
            for i in T.unroll(at_once):
                for c in T.unroll(4):
                    acc[(first * at_once + i) * 4 + c] = words[i * splits * 4 + c]
                    for s in T.unroll(1, splits):
                        acc[(first * at_once + i) * 4 + c] = (
                            acc[(first * at_once + i) * 4 + c] + words[(i * splits + s) * 4 + c]
                        )

    return SimpleNamespace(write=write, add=add)


def epilogue(g: GemmGeometry):
    """`staged_epilogue` or `register_epilogue`, whose functions have the same arguments."""
    return register_epilogue(g) if g.finishes_in_registers else staged_epilogue(g)


def staged_epilogue(g: GemmGeometry):
    """Functions that apply the steps to a CTA's tile at row, column, and store it.

    begin(row_words, operands, thread, row, column, kept, normed)  start to load operands, before the product
    meanwhile(operands, thread, row, kept, normed)                 the rest of that, while the product is under way
    store(acc, base, thread, row_words, operands, out, row, column, statistics, kept, normed)      steps and stores

    A warp passes a few of its rows at a time through its own part of shared memory, from the layout of an mma to whole
    vectors of a row; it waits for no other warp.  A row's vectors lie there in two halves, the first four elements of
    each and the last four, so that neighbouring lanes read neighbouring 16 bytes.

    For a deferred norm, `kept` are the registers (`kept_size` words) in which a lane holds statistics during the
    product.  `normed` is the address of the shared memory that holds the norm's vectors, means and scales for the warp.
    """
    vector = vector_functions(g)
    steps, exists = vector.steps, vector.exists
    row_tiles, col_tiles, passes, pitch = g.row_tiles, g.col_tiles, g.passes, g.staging_pitch * FLOAT_BYTES
    parts, halves = g.column_parts, MMA_ROWS // g.staging_rows
    part_tiles = col_tiles // g.columns_each // parts
    half_rows, measured = MMA_ROWS // 2, min(passes, MOST_MEASURED)

    if g.problem.row_norm is not None:
        pairs = row_pairs(g, g.problem.row_norm, g.normed_rows, 32)
        statistics_place = statistics_operand(g.problem)
        # If two sets of warps take turns, a set has time to merge before its turn.
        merges_first = g.config.sets == 2
        merges_last = pairs.are_kept and not merges_first
    if g.normed_vectors > 0:
        vectors = norm_columns(g, g.normed_columns, 32)

    gated = gated_products(g)

    @T.inline
    def stage(acc, m, first_half, part, lane_address):
        """Write the accumulators of the rows and columns that are staged together to shared memory."""
        for n in T.unroll(part_tiles):
            for half in T.unroll(2 // halves):
                i = T.meta_var((m * col_tiles + part * part_tiles + n) * 4 + 2 * (first_half + half))
                T.ptx["st.shared.v2.f32"](address(lane_address + half * 8 * pitch + n * 16), acc[i], acc[i + 1])

    @T.inline
    def load_row(values, lane_address):
        for i in T.unroll(2):
            T.ptx["ld.shared.v4.f32"](
                values[4 * i],
                values[4 * i + 1],
                values[4 * i + 2],
                values[4 * i + 3],
                address(lane_address + i * g.second_half),
            )

    def row_of(first_row, thread):
        """The first row of a lane; its other rows follow at distances of rows_per_pass."""
        return first_row + g.warp_row(thread // 32) + thread % 32 // g.row_vectors

    def column_of(first_column, thread):
        first = first_column + g.warp_column(thread // 32)
        first = first if g.columns_each == 1 else first // g.columns_each
        return first + thread % 32 % g.row_vectors * VECTOR

    def row_words_of(row_words, part):
        """The words of the vectors in one part of the columns."""
        return Words(row_words, part * steps.row_size)

    def normed_row(first_row, thread):
        """The i-th row of a warp, in the order of its tiles, as `row_pairs` asks for it."""
        first = first_row + g.warp_row(thread // 32)
        return lambda i: first + i // MMA_ROWS * g.row_tile_step + i % MMA_ROWS

    @T.inline
    def merge(operands, thread, first_row, kept, normed):
        statistics = T.meta_var(operands[statistics_place])
        pairs.merge(normed + g.pairs_offset, kept, statistics, thread % 32, normed_row(first_row, thread))

    @T.inline
    def begin(row_words, operands, thread, first_row, first_column, kept=None, normed=None):
        for part in T.unroll(parts):
            column = T.meta_var(column_of(first_column, thread) + part * g.staging_columns)
            if exists(0, column):
                steps.fetch_rows(row_words_of(row_words, part), operands, column)
            if steps.matrix_size > 0:
                for i in T.unroll(row_tiles * halves * passes):
                    staged = T.meta_var(i // passes)
                    first = T.meta_var(staged // halves * g.row_tile_step + staged % halves * half_rows)
                    row = T.meta_var(row_of(first_row, thread) + first + i % passes * g.rows_per_pass)
                    if exists(row, column):
                        steps.prefetch_matrices(operands, row, column)
        if g.problem.row_norm is not None:
            if g.normed_vectors > 0:
                T.cuda.warp_sync()  # the vectors of the tile before have been read
                vectors.keep(normed, operands, thread % 32, first_column + g.warp_column(thread // 32))
            pairs.load(kept, operands[statistics_place], thread % 32, normed_row(first_row, thread))
            if merges_first:
                merge(operands, thread, first_row, kept, normed)

    def pair_address(normed, lane, first):
        """Shared address of the mean and scale of a lane's row, counted from row `first` of its warp."""
        if normed is None:
            return None
        return normed + g.pairs_offset + (first + lane // g.row_vectors) * PAIR_BYTES

    @T.inline
    def meanwhile(operands, thread, first_row, kept, normed):
        if g.problem.row_norm is not None:
            if not merges_first:
                if not merges_last:
                    merge(operands, thread, first_row, kept, normed)

    @T.inline
    def store(
        acc, base, thread, row_words, operands, out, first_row, first_column, statistics=None, kept=None, normed=None
    ):
        if g.problem.row_norm is not None:
            if merges_last:
                merge(operands, thread, first_row, kept, normed)
            if g.normed_vectors > 0:
                T.ptx["cp.async.wait_group"](0)
                T.cuda.warp_sync()
        if g.problem.gate is not None:
            gated(acc, operands, first_column + g.warp_column(thread // 32) + thread % 4 * 2)
        words = T.alloc_local([max(passes * steps.matrix_size, 1)], "uint32")
        lane = T.meta_var(thread % 32)
        staging = base + g.staging_offset + thread // 32 * g.staging_bytes
        write_address = staging + lane // 4 * pitch + lane % 4 // 2 * g.second_half + lane % 2 * 8
        read_address = staging + lane // g.row_vectors * pitch + lane % g.row_vectors * 16
        row = row_of(first_row, thread)
        column = column_of(first_column, thread)
        if g.normed_vectors > 0:
            norm_words = T.alloc_local([vectors.size], "uint32")
        else:
            norm_words = T.meta_var(None)
        for m in T.unroll(row_tiles):
            for staged in T.unroll(halves * parts):
                half = T.meta_var(staged % halves)
                part = T.meta_var(staged // halves)
                part_column = T.meta_var(column + part * g.staging_columns)
                first_of = T.meta_var(m * g.row_tile_step + half * half_rows)
                for i in T.unroll(passes):
                    at = T.meta_var(row + first_of + i * g.rows_per_pass)
                    if exists(at, part_column):
                        steps.fetch_matrices(words, i * steps.matrix_size, operands, at, part_column)
                T.cuda.warp_sync()
                if g.normed_vectors > 0:
                    if half == 0:
                        vectors.fetch(norm_words, normed, part * g.staging_columns + lane % g.row_vectors * VECTOR)
                stage(acc, m, half, part, write_address)
                T.cuda.warp_sync()
                address_of = T.meta_var(
                    lambda i, m=m, half=half: pair_address(
                        normed, lane, m * MMA_ROWS + half * half_rows + i * g.rows_per_pass
                    )
                )
                if g.problem.statistics:
                    for first in T.unroll(passes // measured):
                        all_values = T.alloc_local([measured * VECTOR], "float32")
                        for j in T.unroll(measured):
                            i = T.meta_var(first * measured + j)
                            values = T.alloc_local([VECTOR], "float32")
                            load_row(values, read_address + i * g.rows_per_pass * pitch)
                            own_words = T.meta_var(row_words_of(row_words, part))
                            vector.apply(values, own_words, words, i * steps.matrix_size, address_of(i), norm_words)
                            for c in T.unroll(VECTOR):
                                all_values[j * VECTOR + c] = values[c]
                        vector.store_measured(
                            all_values,
                            measured,
                            out,
                            statistics,
                            lambda j: (row + first_of + (first * measured + j) * g.rows_per_pass, part_column),
                        )
                else:
                    for i in T.unroll(passes):
                        at = T.meta_var(row + first_of + i * g.rows_per_pass)
                        if exists(at, part_column):
                            values = T.alloc_local([VECTOR], "float32")
                            load_row(values, read_address + i * g.rows_per_pass * pitch)
                            own_words = T.meta_var(row_words_of(row_words, part))
                            vector.apply(values, own_words, words, i * steps.matrix_size, address_of(i), norm_words)
                            vector.store(values, out, at, part_column)

    kept_size = pairs.size if g.problem.row_norm is not None else 0
    return SimpleNamespace(
        begin=begin, meanwhile=meanwhile, store=store, row_size=parts * steps.row_size, kept_size=kept_size
    )
