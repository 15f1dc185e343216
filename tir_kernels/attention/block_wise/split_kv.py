"""Device code of the CUDA block-wise kernel for block rows split among CTAs: write partial results and merge them."""

from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.block_wise.softmax import NEGATIVE_INFINITY
from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.cuda.arrival import arrive as arrive_at

AT_ONCE = 8  # 16-byte loads of a thread that are under way together


def split_functions(g: AttentionGeometry, softmax):
    """`write`, `arrive` and `merge` of one CTA, on partial results of `partial_shape`."""
    row_tiles, value_tiles = g.row_tiles, g.value_tiles

    @T.inline
    def write(partials, slot, thread, o, row_max, row_sum):
        """Write the thread's accumulators and statistics to their position in a slot."""
        for m in T.unroll(row_tiles):
            for n in T.unroll(value_tiles):
                oi = T.meta_var((m * value_tiles + n) * 4)
                T.ptx["st.global.v4.f32"](
                    partials.ptr_to([slot, n, m * g.threads + thread, 0]), o[oi], o[oi + 1], o[oi + 2], o[oi + 3]
                )
            T.ptx["st.global.v4.f32"](
                partials.ptr_to([slot, value_tiles, m * g.threads + thread, 0]),
                row_max[2 * m], row_max[2 * m + 1], row_sum[2 * m], row_sum[2 * m + 1],
            )  # fmt: skip

    @T.inline
    def arrive(last, counter, splits, thread, flag, sync=T.cuda.cta_sync):
        """last[0] = 1 in the row's last CTA to arrive, which can read what all of them wrote, else 0."""
        most = T.meta_var(splits - 1)
        is_last = T.meta_var(lambda before: T.Select(T.cast(before, "int32") == most, T.uint32(1), T.uint32(0)))
        arrive_at(last, counter, T.cast(most, "uint32"), is_last, thread, flag, sync)

    @T.inline
    def load(words, i, partials, slot, n, lane_of_tile):
        # Through L2: other multiprocessors wrote it.
        T.ptx["ld.global.cg.v4.f32"](
            words[i], words[i + 1], words[i + 2], words[i + 3], partials.ptr_to([slot, n, lane_of_tile, 0])
        )

    @T.inline
    def merge(partials, first_slot, splits, thread, o, row_max, row_sum):
        """Compute o, row_max and row_sum of the whole row from all slots, in order: the result never varies."""
        words = T.alloc_local([AT_ONCE * 4], "float32")
        state = T.alloc_local([4], "float32")
        new_max = T.alloc_local([1], "float32")
        weight = T.alloc_local([2], "float32")  # factors of split s, for the two rows
        rescale = T.alloc_local([2], "float32")
        for i in T.unroll(row_tiles * 2):
            row_max[i] = T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY))
            row_sum[i] = T.float32(0)
        for i in T.unroll(row_tiles * value_tiles * 4):
            o[i] = T.float32(0)
        for s in T.serial(splits):
            for m in T.unroll(row_tiles):
                load(state, 0, partials, first_slot + s, value_tiles, m * g.threads + thread)
                for first in T.unroll(-(-value_tiles // AT_ONCE)):
                    for i in T.unroll(AT_ONCE):
                        if first * AT_ONCE + i < value_tiles:
                            load(words, i * 4, partials, first_slot + s, first * AT_ONCE + i, m * g.threads + thread)
                    if first == 0:
                        for r in T.unroll(2):
                            new_max[0] = T.max(row_max[2 * m + r], state[r])
                            softmax.weights(rescale, weight, r, row_max[2 * m + r], state[r], new_max[0])
                            row_max[2 * m + r] = new_max[0]
                            row_sum[2 * m + r] = row_sum[2 * m + r] * rescale[r] + state[2 + r] * weight[r]
                    for i in T.unroll(AT_ONCE):
                        if first * AT_ONCE + i < value_tiles:
                            for c in T.unroll(4):
                                oi = T.meta_var((m * value_tiles + first * AT_ONCE + i) * 4 + c)
                                o[oi] = o[oi] * rescale[c // 2] + words[i * 4 + c] * weight[c // 2]

    return SimpleNamespace(write=write, arrive=arrive, merge=merge)
