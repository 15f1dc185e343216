"""The grouped product on CPUs: tiles of the rows of one group, found from the offsets, in parallel.

A task has a block of rows of one group and a block of columns.  It keeps the columns' part of the weight in its cache
while it goes through its rows, a few at a time, whose sums are in registers: vectors along k for weights (n, k), added
up at the end, and vectors along n for weights (k, n).  Groups without rows cost nothing but a look at their offset.
"""

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.cpu.vector import horizontal_sum, span, splat, whole
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.fusion.grouped.problem import GroupedProblem

MOST_ROWS = 4  # of a register tile
BLOCK_ROWS = 32  # of a task: they share the weight's columns while these are in the cache
BLOCK_COLUMNS = 96


def grouped_product(problem: GroupedProblem, width: int, registers: int) -> tvm.tirx.PrimFunc:
    """The PrimFunc of (a, w, offsets, out) for a processor with `registers` vector registers of `width` floats."""
    m, n, k, groups, dtype = problem.m, problem.n, problem.k, problem.groups, problem.dtype
    is_nk = problem.w_layout == "nk"
    rows = max(1, min(MOST_ROWS, m // groups))  # a tile of the few rows that a group has on average
    accumulators = registers * 3 // 4
    at_once = max(1, min(accumulators // rows, 4 if is_nk else min(6, n // width)))  # columns, or vectors of columns
    columns = at_once if is_nk else at_once * width
    block_rows = rows * max(1, min(BLOCK_ROWS // rows, -(-m // (groups * rows))))
    tiles_of_block = max(1, BLOCK_COLUMNS // columns)
    whole_tiles = -(-n // columns) if is_nk else n // columns
    column_blocks = max(1, -(-whole_tiles // tiles_of_block))
    tasks = problem.row_tiles(block_rows) * column_blocks
    vectors = k // width
    w_shape, vec = problem.w_shape, f"float32x{width}"
    offsets_dtype = problem.offsets_dtype

    def index(row):
        return T.cast(row, "int64") if problem.is_large else row

    def wide(value, size=width):
        if dtype == "float32":
            return value
        return T.cast(value, "float32" if size == 1 else f"float32x{size}")

    @T.inline
    def of_columns(a, w, out, acc, total, group, first, end, column):
        """Rows first … first + rows - 1 by `columns` columns from `column` on, for weights with rows along k."""
        row = T.meta_var(lambda r: T.min(first + r, end - 1))
        at = T.meta_var(lambda c: T.min(column + c, n - 1))
        for i in T.unroll(rows * at_once):
            acc[i] = splat(0.0, width)
        for v in T.serial(vectors):
            for c in T.unroll(at_once):
                for r in T.unroll(rows):
                    acc[r * at_once + c] = acc[r * at_once + c] + wide(a[row(r), span(v * width, width)]) * wide(
                        w[group, at(c), span(v * width, width)]
                    )
        for r in T.unroll(rows):
            for c in T.unroll(at_once):
                if T.And(first + r < end, column + c < n):
                    total[0] = horizontal_sum(acc[r * at_once + c], width)
                    for i in T.serial(k - vectors * width):
                        last = T.meta_var(vectors * width + i)
                        total[0] = total[0] + wide(a[first + r, last], 1) * wide(w[group, column + c, last], 1)
                    out[first + r, column + c] = T.cast(total[0], dtype)

    @T.inline
    def of_vectors(a, w, out, acc, total, group, first, end, column):
        """The same for weights with rows along n: `at_once` vectors of columns, of which all exist."""
        row = T.meta_var(lambda r: T.min(first + r, end - 1))
        for i in T.unroll(rows * at_once):
            acc[i] = splat(0.0, width)
        for i in T.serial(k):
            for r in T.unroll(rows):
                for c in T.unroll(at_once):
                    acc[r * at_once + c] = acc[r * at_once + c] + splat(wide(a[row(r), i], 1), width) * wide(
                        w[group, i, span(column + c * width, width)]
                    )
        for r in T.unroll(rows):
            if first + r < end:
                for c in T.unroll(at_once):
                    value = T.meta_var(acc[r * at_once + c])
                    at = T.meta_var(span(column + c * width, width))
                    out[first + r, at] = value if dtype == "float32" else T.cast(value, f"{dtype}x{width}")

    @T.inline
    def one_by_one(a, w, out, total, group, row):
        """The last columns of a row, fewer than `columns`, for weights with rows along n."""
        for c in T.serial(n - whole_tiles * columns):
            total[0] = T.float32(0)
            for i in T.serial(k):
                total[0] = total[0] + wide(a[row, i], 1) * wide(w[group, i, whole_tiles * columns + c], 1)
            out[row, whole_tiles * columns + c] = T.cast(total[0], dtype)

    multiply = of_columns if is_nk else of_vectors

    with quick_script():

        @T.prim_func(private=True, s_tir=True)
        def grouped(
            a: T.Buffer((m, k), dtype, align=1),  # type: ignore[valid-type]
            w: T.Buffer(w_shape, dtype, align=1),  # type: ignore[valid-type]
            offsets: T.Buffer((groups,), offsets_dtype, align=1),  # type: ignore[valid-type]
            out: T.Buffer((m, n), dtype, align=1),  # type: ignore[valid-type]
        ):
            T.func_attr({"tirx.noalias": True, "op_pattern": 8})
            for task in T.parallel(tasks):
                with T.sblock("rows"):
                    vt = T.axis.spatial(tasks, task)
                    T.reads(*map(whole, (a, w, offsets)))
                    T.writes(whole(out))
                    acc = T.sblock_alloc_buffer((rows * at_once,), vec, scope="local")
                    total = T.sblock_alloc_buffer((1,), "float32", scope="local")
                    # The group, its first and last row here, and for the search: rows and blocks of groups so far.
                    found = T.sblock_alloc_buffer((5,), "int32", scope="local")
                    block: T.let = vt // column_blocks
                    tile: T.let = vt % column_blocks * tiles_of_block
                    last_tile: T.let = T.min(tile + tiles_of_block, whole_tiles)
                    is_last: T.let = vt % column_blocks == column_blocks - 1
                    found[0] = -1
                    found[3] = 0
                    found[4] = 0
                    for g in T.serial(groups + 1):
                        offset: T.let = T.cast(offsets[T.min(g, groups - 1)], "int32")
                        end: T.let = T.Select(g == groups, m, T.max(found[3], T.min(offset, m)))
                        blocks: T.let = (end - found[3] + (block_rows - 1)) // block_rows
                        if T.And(found[4] <= block, block < found[4] + blocks):
                            found[0] = g
                            found[1] = found[3] + (block - found[4]) * block_rows
                            found[2] = T.min(found[1] + block_rows, end)
                        found[4] = found[4] + blocks
                        found[3] = end
                    if found[0] == groups:
                        stop: T.let = T.Select(is_last, n, last_tile * columns)
                        for r in T.serial(found[2] - found[1]):
                            for c in T.serial(stop - tile * columns):
                                out[index(found[1] + r), tile * columns + c] = T.cast(0.0, dtype)
                    if T.And(found[0] >= 0, found[0] < groups):
                        for t in T.serial(last_tile - tile):
                            for r in T.serial((found[2] - found[1] + (rows - 1)) // rows):
                                multiply(
                                    a, w, out, acc, total,
                                    index(found[0]), index(found[1] + r * rows), index(found[2]), (tile + t) * columns,
                                )  # fmt: skip
                        if n > whole_tiles * columns:
                            if is_last:
                                for r in T.serial(found[2] - found[1]):
                                    one_by_one(a, w, out, total, index(found[0]), index(found[1] + r))

    return grouped
