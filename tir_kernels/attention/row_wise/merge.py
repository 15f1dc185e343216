"""Device code of the CUDA row-wise kernel that merges partial softmax results, of warps and of splits.

A partial result is a record of `RowWiseGeometry.record_shape` floats: each row's output before normalization, then the
maximum of its scores and the sum of their exponentials.  Warps leave records in shared memory, splits in global memory.
"""

import math
from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.softmax import LOG2E, NEGATIVE_INFINITY
from tir_kernels.attention.row_wise.geometry import RowWiseGeometry
from tir_kernels.attention.sink import add_to_row
from tir_kernels.cuda.ptx import ALL_LANES, SHORT, address

VECTOR = 4  # floats in the 16 bytes of one load of a record
LN2 = math.log(2)
AT_ONCE = 8  # records whose loads are under way together


def partial_results(g: RowWiseGeometry, to_exponent: float):
    """`write_record` for a warp, and `merge_function`, `add_sink` and `store_lse` for a thread.

    Scores times `to_exponent` are exponents for exp2.
    """
    rows, pitch = g.record_shape
    statistics = g.warp.v_head_dim
    minus_infinity = lambda: T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))

    def shuffle(x, distance):
        return T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), x, distance, 32, 32)

    @T.inline
    def write_row(start, lane, o, r, row_max, total):
        for n in T.unroll(g.warp.value_tiles):
            T.ptx["st.shared.v2.f32"](address(start + n * 32 + lane % 4 * 8), o[n * 4 + r * 2], o[n * 4 + r * 2 + 1])
        if lane % 4 == 0:
            T.ptx["st.shared.v2.f32"](address(start + statistics * 4), row_max[r], total[0])

    @T.inline
    def write_record(start, lane, o, row_max, row_sum):
        """Write the warp's accumulators to its record at shared address `start`."""
        total = T.alloc_local([1], "float32")
        for r in T.unroll(2 if rows > 8 else 1):
            total[0] = row_sum[r]
            total[0] = total[0] + shuffle(total[0], 1)
            total[0] = total[0] + shuffle(total[0], 2)
            row = T.meta_var(r * 8 + lane // 4)
            if rows < (r + 1) * 8:
                if row < rows:
                    write_row(start + row * (pitch * 4), lane, o, r, row_max, total)
            else:
                write_row(start + row * (pitch * 4), lane, o, r, row_max, total)

    def merge_function(load, at_once):
        """`merge(merged, n_records, row, element)`, `at_once` records at a time.

        `load(words, i, record, row, element)` puts four floats of a record in words[i…].
        """

        @T.inline
        def merge(merged, n_records, row, element):
            """merged[0:4] = the output at element…element+3 before normalization, [4] the maximum, [5] the sum."""
            words = T.alloc_local([at_once * VECTOR], "float32")
            state = T.alloc_local([at_once * VECTOR], "float32")
            new_max = T.alloc_local([1], "float32")
            weight = T.alloc_local([1], "float32")
            for i in T.unroll(6):
                merged[i] = T.float32(0)
            merged[4] = minus_infinity()
            for first in T.serial((n_records + (at_once - 1)) // at_once):
                for i in T.unroll(at_once):
                    record = T.meta_var(T.min(first * at_once + i, n_records - 1))
                    load(state, i * VECTOR, record, row, statistics)
                    load(words, i * VECTOR, record, row, element)
                new_max[0] = merged[4]
                for i in T.unroll(at_once):
                    new_max[0] = T.max(new_max[0], state[i * VECTOR])
                # In a row that has kept nothing yet, exp2(-inf - offset) must be 0, which any finite offset gives.
                weight[0] = T.Select(new_max[0] == minus_infinity(), T.float32(0), new_max[0])
                for i in T.unroll(at_once):
                    state[i * VECTOR] = T.Select(
                        first * at_once + i < n_records,
                        T.exp2((state[i * VECTOR] - weight[0]) * T.float32(to_exponent)),
                        T.float32(0),
                    )
                weight[0] = T.exp2((merged[4] - weight[0]) * T.float32(to_exponent))
                merged[4] = new_max[0]
                merged[5] = merged[5] * weight[0]
                for j in T.unroll(VECTOR):
                    merged[j] = merged[j] * weight[0]
                for i in T.unroll(at_once):
                    merged[5] = merged[5] + state[i * VECTOR] * state[i * VECTOR + 1]
                    for j in T.unroll(VECTOR):
                        merged[j] = merged[j] + state[i * VECTOR] * words[i * VECTOR + j]

        return merge

    @T.inline
    def add_sink(merged, sink, kv_head, row):
        """Add the sink of its query head to a row's whole result; from then on the maximum is natural."""
        share = T.alloc_local([1], "float32")
        own = T.alloc_local([1], "float32")
        new_max = T.alloc_local([1], "float32")
        logit = T.meta_var(T.cast(sink[kv_head * g.problem.group + row // g.problem.q_len], "float32"))
        add_to_row(share, own, new_max, merged[4] * T.float32(to_exponent / LOG2E), logit)
        for j in T.unroll(VECTOR):
            merged[j] = merged[j] * share[0]
        merged[4] = new_max[0]
        merged[5] = merged[5] * share[0] + own[0]

    def logarithm(largest, total):
        if g.problem.sink_dtype is not None:
            return largest + T.log2(total) * T.float32(LN2)
        return (largest * T.float32(to_exponent) + T.log2(total)) * T.float32(LN2)

    @T.inline
    def store_lse(lse, merged, b, kv_head, row):
        """Write the log-sum-exp of a row of the query heads that share a key/value head."""
        lse[b, kv_head * g.problem.group + row // g.problem.q_len, row % g.problem.q_len] = T.Select(
            merged[5] == T.float32(0), minus_infinity(), logarithm(merged[4], merged[5])
        )

    return SimpleNamespace(
        write_record=write_record, merge_function=merge_function, add_sink=add_sink, store_lse=store_lse
    )


def output_store(g: RowWiseGeometry):
    """`store(merged, pointer)`: store four normalized elements of the output, 0 if the row kept nothing."""
    is_float32 = g.problem.dtype == "float32"
    pack_instruction = "" if is_float32 else f"cvt.rn.{SHORT[g.problem.dtype]}x2.f32"

    @T.inline
    def store(merged, pointer):
        word = T.alloc_local([2], "uint32")
        factor = T.alloc_local([1], "float32")
        factor[0] = T.Select(merged[5] == T.float32(0), T.float32(0), T.float32(1) / merged[5])
        if is_float32:
            T.ptx["st.global.v4.f32"](pointer, *[merged[i] * factor[0] for i in range(VECTOR)])
        else:
            for i in T.unroll(2):
                T.ptx[pack_instruction](word[i], merged[2 * i + 1] * factor[0], merged[2 * i] * factor[0])
            T.ptx["st.global.v2.b32"](pointer, word[0], word[1])

    return store
