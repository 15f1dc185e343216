"""Device code of the CUDA block-wise kernel for attention in parts: read a prior result, write the log-sum-exp."""

import math
from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.softmax import NEGATIVE_INFINITY
from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.cuda.ptx import element

LN2 = math.log(2)


def part_functions(g: AttentionGeometry, softmax):
    """`load_prior` and `store_lse` of one warp; row r of its tiles is token first_row + r * token_stride."""
    problem = g.problem
    row_tiles, value_tiles, stride = g.row_tiles, g.value_tiles, g.config.token_stride
    scale = softmax.natural_scale
    final_scale = scale if problem.sink_dtype is None else 1.0  # the sink makes maxima natural

    @T.inline
    def load_pair(words, pointer):
        """Load two neighbours, the first of which has an even number, at once."""
        if problem.dtype == "float32":
            T.ptx["ld.global.v2.b32"](words[0], words[1], pointer)
        else:
            T.ptx["ld.global.b32"](words[0], pointer)

    @T.inline
    def load_prior(prior, prior_lse, b, h, first_row, lane, o, row_max, row_sum):
        """Start accumulators and statistics as if the prior part were one score equal to its log-sum-exp."""
        words = T.alloc_local([2], "uint32")
        for m in T.unroll(row_tiles):
            for r in T.unroll(2):
                row = T.meta_var(first_row + (m * 16 + r * 8 + lane // 4) * stride)
                if g.has_row(row):
                    state = T.meta_var(m * 2 + r)
                    row_max[state] = prior_lse[b, h, row] / T.float32(scale)
                    # One lane of four holds the prior part's sum; a row that kept nothing has none.
                    if T.And(lane % 4 == 0, row_max[state] != T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))):
                        row_sum[state] = T.float32(1)
                    for n in T.unroll(value_tiles):
                        first = T.meta_var(n * 8 + lane % 4 * 2)
                        if first < problem.v_head_dim:
                            load_pair(words, prior.ptr_to([*problem.index("out", b, h, row, first)]))
                            for c in T.unroll(2):
                                o[(m * value_tiles + n) * 4 + r * 2 + c] = element(words, 0, c, problem.dtype)

    @T.inline
    def store_lse(lse, b, h, first_row, lane, row_max, row_sum):
        """Write the log-sum-exp of the rows; runs after `normalize`, which leaves the whole row's sum in row_sum."""
        for m in T.unroll(row_tiles):
            for r in T.unroll(2):
                row = T.meta_var(first_row + (m * 16 + r * 8 + lane // 4) * stride)
                state = T.meta_var(m * 2 + r)
                if T.And(g.has_row(row), lane % 4 == 0):
                    lse[b, h, row] = T.Select(
                        row_sum[state] == T.float32(0),
                        T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)),
                        row_max[state] * T.float32(final_scale) + T.log2(row_sum[state]) * T.float32(LN2),
                    )

    return SimpleNamespace(load_prior=load_prior, store_lse=store_lse)
