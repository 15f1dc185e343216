"""Device code of deferred norms in the CUDA matrix products: statistics of rows read, applied, and written.

A row's statistics are merged into two numbers, scale and shift, and the norm is x * scale + shift: 8 bytes of shared
memory for each row.  Nothing waits for the statistics, because they are loaded ahead of the product's own tiles.  If
there are enough registers to keep them, they are merged after the product.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import ALL_LANES, address, element
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES
from tir_kernels.fusion.gemm.sizes.geometry import FLOAT_BYTES, PAIR_BYTES, GemmGeometry
from tir_kernels.fusion.problem import STATISTICS_COLUMNS, GemmProblem, Norm
from tir_kernels.fusion.steps import VECTOR

ROW_LANES = 4  # lanes that share a row's statistics, at most
LOADS_AT_ONCE = 16  # loads of a lane that are under way together
MOST_KEPT = 32  # registers of a lane in which statistics are kept during a product
PART_LANES = STATISTICS_COLUMNS // VECTOR  # neighbouring lanes that hold the columns of one pair


def first_step_operand(problem: GemmProblem) -> int:
    """Index of the steps' first operand; the bias of a gate, or the operands of `a_norm`, come before it."""
    if problem.gate_bias:
        return 1
    return 0 if problem.a_norm is None else 1 + (problem.a_norm.kind == "layer_norm")


def statistics_operand(problem: GemmProblem) -> int:
    """Index of the operand with the statistics that the product reads."""
    if problem.a_norm is not None:
        return 0
    before = problem.steps[: problem.steps.index(problem.normed_step)]
    return sum(step.operand is not None for step in before) + 1


@T.inline
def add_lanes(total, i, lanes):
    """Replace total[i] by its sum over `lanes` neighbouring lanes."""
    for bit in T.unroll(lanes.bit_length() - 1):
        total[i] = total[i] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), total[i], 1 << bit, 32, 32)


def row_pairs(g: GemmGeometry, norm: Norm, rows: int, workers: int):
    """Functions that compute (scale, -mean * scale) of `rows` rows with `workers` numbered threads (whole warps).

    load(words, statistics, worker, row_of)              if `are_kept`, load to words[`size`], ahead of the product
    merge(pairs, words, statistics, worker, row_of)      store the pairs to shared memory; loads first if not `are_kept`

    `row_of(i)` is the i-th row's index in the matrix.  Rows past the matrix's end repeat the last one.  A warp's own
    pairs may be read after a `warp_sync`.

    Means are summed as differences to the first one, so nothing cancels if they are large and nearly equal.
    """
    m, parts = g.problem.m, g.row_norm_parts
    per_load = 2 - parts % 2  # pairs of one load: two, 16 bytes, if the rows of the statistics are aligned to that
    loads = parts // per_load
    lanes = ROW_LANES if loads >= ROW_LANES else 1 + (loads > 1)
    of_lane = -(-loads // lanes)
    rounds = -(-of_lane // LOADS_AT_ONCE)
    at_once = -(-of_lane // rounds)
    together = workers // lanes  # rows that all workers merge at the same time
    passes = -(-rows // together)  # rows of a lane, `ahead` of which it reads before it adds up the first
    ahead = min(passes, max(LOADS_AT_ONCE // at_once, 1))
    groups = -(-passes // ahead)
    centred = norm.kind == "layer_norm"
    ends = lanes * at_once * rounds != loads
    instruction = "ld.global.nc.v4.f32" if per_load == 2 else "ld.global.nc.v2.f32"
    width = 2 * per_load
    size = ahead * at_once * width + ahead  # the words of `ahead` rows, and the first mean of each
    are_kept = groups * rounds == 1 and size <= MOST_KEPT

    def exists(load):
        return load < loads if ends else True

    @T.inline
    def load_some(words, at, statistics, row, first):
        for i in T.unroll(at_once):
            load = T.meta_var(T.min(first + i * lanes, loads - 1) if ends else first + i * lanes)
            T.ptx[instruction](
                *[words[at + i * width + c] for c in range(width)], statistics.ptr_to([row, load * per_load, 0])
            )

    @T.inline
    def add(total, words, shift, at):
        """Add a pair to total[0], the differences of means, and total[1], the squared deviations from the shift."""
        away = T.meta_var(words[at] - shift if centred else words[at])
        if centred:
            total[0] = total[0] + away
        total[1] = total[1] + (words[at + 1] + away * away * T.float32(STATISTICS_COLUMNS))

    @T.inline
    def merge_row(total, words, at, shift, statistics, row, lane):
        """Compute total = (scale, shift) of a row whose first words are loaded."""
        total[0] = T.float32(0)
        total[1] = T.float32(0)
        for r in T.serial(rounds):
            first = T.meta_var(r * (at_once * lanes) + lane)
            if rounds > 1:
                if r > 0:
                    load_some(words, at, statistics, row, first)
            for i in T.unroll(at_once):
                if exists(first + i * lanes):
                    for c in T.unroll(per_load):
                        add(total, words, shift, at + i * width + 2 * c)
        add_lanes(total, 1, lanes)
        if centred:
            add_lanes(total, 0, lanes)
            total[0] = total[0] * T.float32(1 / parts)
            total[1] = total[1] - total[0] * total[0] * T.float32(STATISTICS_COLUMNS * parts)
            total[0] = total[0] + shift
        total[1] = T.rsqrt(total[1] * T.float32(1 / (STATISTICS_COLUMNS * parts)) + T.float32(norm.eps))
        total[0] = -total[0] * total[1]

    def place_of(i, worker):
        """Index of a worker's i-th row among all rows."""
        row = i * together + worker // lanes
        return T.min(row, rows - 1) if groups * ahead * together > rows else row

    def matrix_row(i, worker, row_of):
        row = row_of(place_of(i, worker))
        return T.min(row, m - 1) if g.m_ends else row

    @T.inline
    def load_rows(words, statistics, worker, row_of, group):
        for i in T.unroll(ahead):
            row = T.meta_var(matrix_row(group * ahead + i, worker, row_of))
            load_some(words, i * at_once * width, statistics, row, worker % lanes)
            if centred:
                T.ptx["ld.global.nc.f32"](words[size - ahead + i], statistics.ptr_to([row, 0, 0]))

    @T.inline
    def load(words, statistics, worker, row_of):
        if are_kept:
            load_rows(words, statistics, worker, row_of, 0)

    @T.inline
    def merge(pairs, words, statistics, worker, row_of):
        total = T.alloc_local([2], "float32")
        lane = T.meta_var(worker % lanes)
        T.cuda.warp_sync()  # the pairs of the tile before have been read
        for group in T.serial(groups):
            if not are_kept:
                load_rows(words, statistics, worker, row_of, group)
            for i in T.unroll(ahead):
                row = T.meta_var(matrix_row(group * ahead + i, worker, row_of))
                merge_row(total, words, i * at_once * width, words[size - ahead + i], statistics, row, lane)
                if lane == 0:
                    T.ptx["st.shared.v2.f32"](
                        address(pairs + place_of(group * ahead + i, worker) * PAIR_BYTES), total[1], total[0]
                    )

    return SimpleNamespace(load=load, merge=merge, size=size, are_kept=are_kept)


def norm_columns(g: GemmGeometry, columns: int, workers: int):
    """Functions that pass a deferred norm's vectors for `columns` columns through shared memory.

    keep(at, operands, worker, first_column)     `workers` threads start to copy both vectors to `at`, as a copy group
    fetch(words, at, column)                     load 8 elements of each vector at `at`, from `column` on
    """
    problem = g.problem
    each, chunks = columns * FLOAT_BYTES, columns * FLOAT_BYTES // CHUNK_BYTES
    chunk_columns, first_operand = CHUNK_BYTES // FLOAT_BYTES, statistics_operand(problem) + 1

    def exists(chunk, column):
        conditions = [chunk < chunks] * (chunks % workers > 0) + [column < problem.n] * g.n_ends
        return T.And(*conditions) if len(conditions) == 2 else conditions[0] if conditions else True

    @T.inline
    def keep(at, operands, worker, first_column):
        for i in T.unroll(-(-chunks // workers)):
            chunk = T.meta_var(i * workers + worker)
            column = T.meta_var(first_column + chunk * chunk_columns)
            if exists(chunk, column):
                for row in T.unroll(2):
                    T.ptx["cp.async.cg.shared.global"](
                        address(at + row * each + chunk * CHUNK_BYTES),
                        operands[first_operand].ptr_to([row, column]),
                        CHUNK_BYTES,
                    )
        T.ptx["cp.async.commit_group"]()

    @T.inline
    def fetch(words, at, column):
        for row in T.unroll(2):
            for i in T.unroll(VECTOR // 4):
                first = T.meta_var(row * VECTOR + 4 * i)
                T.ptx["ld.shared.v4.b32"](
                    words[first], words[first + 1], words[first + 2], words[first + 3],
                    address(at + row * each + column * FLOAT_BYTES + i * CHUNK_BYTES),
                )  # fmt: skip

    return SimpleNamespace(keep=keep, fetch=fetch, size=2 * VECTOR)


@T.inline
def load_pair(pair, pair_address):
    """(scale, shift) of a row from shared memory."""
    T.ptx["ld.shared.v2.f32"](pair[0], pair[1], address(pair_address))


@T.inline
def correct(values, pair, columns):
    """Turn the product with a into the product with norm(a); `columns` is what `norm_columns` fetched, or None."""
    for i in T.unroll(VECTOR):
        if columns is None:
            values[i] = values[i] * pair[0]
        else:
            values[i] = values[i] * pair[0] + (
                pair[1] * element(columns, 0, i, "float32") + element(columns, VECTOR, i, "float32")
            )


@T.inline
def measure(means, squares, values, count):
    """Compute means and squared deviations of `count` rows, each held as 8 values in each of `PART_LANES` lanes.

    All lanes of a warp take part, even those whose row does not exist.  All rows are exchanged together, because
    exchanges that wait for each other take long.  The difference of the two sums loses less precision than rounding
    to half precision already did.
    """
    for r in T.unroll(count):
        means[r] = values[r * VECTOR]
        squares[r] = values[r * VECTOR] * values[r * VECTOR]
        for i in T.unroll(1, VECTOR):
            means[r] = means[r] + values[r * VECTOR + i]
            squares[r] = values[r * VECTOR + i] * values[r * VECTOR + i] + squares[r]
    others = T.alloc_local([2 * count], "float32")
    for bit in T.unroll(PART_LANES.bit_length() - 1):
        for r in T.unroll(count):
            others[2 * r] = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), means[r], 1 << bit, 32, 32)
            others[2 * r + 1] = T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), squares[r], 1 << bit, 32, 32)
        for r in T.unroll(count):
            means[r] = means[r] + others[2 * r]
            squares[r] = squares[r] + others[2 * r + 1]
    for r in T.unroll(count):
        means[r] = means[r] * T.float32(1 / STATISTICS_COLUMNS)
        squares[r] = T.max(squares[r] - means[r] * means[r] * T.float32(STATISTICS_COLUMNS), T.float32(0))
