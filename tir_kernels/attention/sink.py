"""Device code of the CUDA attention kernels for a sink: one more score in each row, whose value is 0.

The sink is added last, when a row's parts are merged, so it counts once even if the row was split or continued.  The
exponent is taken from the larger of the row's maximum and the sink: neither overflows.  Maxima are natural logarithms
from then on.
"""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.softmax import LOG2E, NEGATIVE_INFINITY
from tir_kernels.attention.geometry import AttentionGeometry


@T.inline
def add_to_row(share, own, new_max, largest, sink):
    """Set new_max[0] to the larger of the row's maximum and the sink.

    Relative to it, share[0] becomes the factor of the row's sums, and own[0] the sink's term.
    """
    offset = T.alloc_local([1], "float32")
    new_max[0] = T.max(largest, sink)
    # If nothing is kept and the sink is -inf, exp2(-inf - offset) must be 0, which any finite offset gives.
    offset[0] = T.Select(new_max[0] == T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)), T.float32(0), new_max[0])
    share[0] = T.exp2((largest - offset[0]) * T.float32(LOG2E))
    own[0] = T.exp2((sink - offset[0]) * T.float32(LOG2E))


def sink_functions(g: AttentionGeometry, natural_scale: float):
    """`add(sink, lane, o, row_max, row_sum)` for one warp of the block-wise kernel, before it normalizes its sums.

    Row maxima times `natural_scale` are maxima of the scores of problem.py.
    """
    row_tiles, value_tiles = g.row_tiles, g.value_tiles

    @T.inline
    def add(sink, lane, o, row_max, row_sum):
        share = T.alloc_local([1], "float32")
        own = T.alloc_local([1], "float32")
        new_max = T.alloc_local([1], "float32")
        for m in T.unroll(row_tiles):
            for r in T.unroll(2):
                state = T.meta_var(m * 2 + r)
                add_to_row(share, own, new_max, row_max[state] * T.float32(natural_scale), sink)
                row_max[state] = new_max[0]
                # Each lane holds its share of the sum; one lane of four adds the sink's term.
                row_sum[state] = row_sum[state] * share[0] + T.Select(lane % 4 == 0, own[0], T.float32(0))
                for n in T.unroll(value_tiles):
                    for c in T.unroll(2):
                        oi = T.meta_var((m * value_tiles + n) * 4 + r * 2 + c)
                        o[oi] = o[oi] * share[0]

    return SimpleNamespace(add=add)
