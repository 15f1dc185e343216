"""Device code of the CUDA attention kernels between the two products: keep bits, bias, online softmax.

A lane's score i of an m16 tile is accumulator i % 4 of n8 tile i / 4: row lane/4 + 8 * (i % 4 / 2), column
8 * (i / 4) + 2 * (lane % 4) + i % 2.  Row statistics are kept per (m16 tile, half) = 2 rows a tile and lane.
"""

import math
from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.attention.geometry import AttentionGeometry
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.float32.functions import tanh as exact_tanh
from tir_kernels.cuda.ptx import ALL_LANES

LOG2E = 1 / math.log(2)
NEGATIVE_INFINITY = 0xFF800000  # float32 bits
STALE = 8.0  # by which powers of 2 may exceed 1 before a maximum is replaced


def folded_factor(problem: AttentionProblem) -> float | None:
    """The factor of scores that is folded into the softmax's exponent, or None.

    exp(scale * x - m) is one FMA and one exp2 when scale * log2(e) is folded in.  So is exp(softcap * tanh(…) - m).
    With a bias, or with a scale that reverses their order, scores become those of problem.py first: log2(e) times a
    bias of finfo.min would overflow.
    """
    if problem.bias_shape is not None:
        return None
    if problem.softcap is not None:
        return problem.softcap
    return problem.scale if problem.scale > 0 else None


def before_bias(problem: AttentionProblem, product):
    """The score before its bias that the product q·k gives; with a softcap that is folded, the score over it."""
    if problem.softcap is None:
        return product * T.float32(problem.scale)
    # --use_fast_math makes tanhf one instruction, tanh.approx, with a relative error of 2^-11: that of a float16.
    tanh = exact_tanh if problem.dtype == "float32" else T.tanh
    bounded = tanh(product * T.float32(problem.scale / problem.softcap))
    return bounded if folded_factor(problem) else bounded * T.float32(problem.softcap)


def softmax_functions(g: AttentionGeometry):
    """`load_keep`, `keeps_any`, `mask`, `mask_from`, `to_natural`, `update` (online softmax), `weights`, `normalize`.

    All are one warp's.  Row maxima times `natural_scale` are maxima of the scores of problem.py.
    """
    problem = g.problem
    row_tiles, score_tiles, value_tiles, keep_words = g.row_tiles, g.score_tiles, g.value_tiles, g.keep_words
    kv_len, stride = problem.kv_len, g.config.token_stride
    factor = folded_factor(problem)
    folded, natural_scale = factor is not None, 1.0 if factor is None else factor
    to_exponent = natural_scale * LOG2E

    @T.inline
    def load_keep(keep, keep_bits, part, row_tile, lane):
        """Load the lane's keep bits of partial block `part`, `keep_words` words for each of the warp's m16 tiles."""
        for m in T.unroll(row_tiles):
            for w in T.unroll(keep_words):
                keep[m * keep_words + w] = keep_bits[part, row_tile + m, lane, w]

    @T.inline
    def keeps_any(active, keep):
        """Set active[0] to whether any lane of the warp has a keep bit; its rows of a partial block may be empty."""
        active[0] = T.uint32(0)
        for w in T.unroll(row_tiles * keep_words):
            active[0] = active[0] | keep[w]
        active[0] = T.cast(T.cuda.any_sync(T.uint32(ALL_LANES), active[0] != T.uint32(0)), "uint32")

    @T.inline
    def mask(s, keep):
        for m in T.unroll(row_tiles):
            for i in T.unroll(score_tiles * 4):
                si = T.meta_var(m * score_tiles * 4 + i)
                bit = T.meta_var(T.uint32(1) << T.cast(i % 32, "uint32"))
                s[si] = T.Select(
                    (keep[m * keep_words + i // 32] & bit) != T.uint32(0),
                    s[si],
                    T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)),
                )

    @T.inline
    def mask_from(limit, s, first_col, lane):
        """Mask the keys from `limit` on in a block whose first key is `first_col`."""
        if first_col + g.config.block_n * stride > limit:
            for m in T.unroll(row_tiles):
                for i in T.unroll(score_tiles * 4):
                    si = T.meta_var(m * score_tiles * 4 + i)
                    s[si] = T.Select(
                        first_col + (i // 4 * 8 + lane % 4 * 2 + i % 2) * stride < limit,
                        s[si],
                        T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)),
                    )

    @T.inline
    def to_natural(s, bias, b, h, first_row, first_col, lane):
        """s = `before_bias` + bias; positions past the lengths read a bias that exists and are masked afterwards."""
        for m in T.unroll(row_tiles):
            for i in T.unroll(score_tiles * 4):
                si = T.meta_var(m * score_tiles * 4 + i)
                if problem.bias_shape is None:
                    s[si] = before_bias(problem, s[si])
                else:
                    row = T.meta_var(g.row_of_token(first_row + (m * 16 + i % 4 // 2 * 8 + lane // 4) * stride))
                    col = T.meta_var(T.min(first_col + (i // 4 * 8 + lane % 4 * 2 + i % 2) * stride, kv_len - 1))
                    s[si] = before_bias(problem, s[si]) + T.cast(bias[problem.bias_index(b, h, row, col)], "float32")

    def _shuffle(x, distance):
        return T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), x, distance, 32, 32)

    def exponential(x, offset):
        if folded:
            return T.exp2(x * T.float32(to_exponent) - offset)
        return T.exp2((x - offset) * T.float32(to_exponent))

    @T.inline
    def exponentiate(s, row_max, row_sum, new_max, offset, rescale, i, m, r):
        """For rows r of tile m: s becomes exp(s - new maximum); rescale[i] is the factor of what was summed before.

        new_max and offset are scratch of one element.
        """
        state = T.meta_var(m * 2 + r)
        new_max[0] = row_max[state]
        for n in T.unroll(score_tiles):
            for c in T.unroll(2):
                new_max[0] = T.max(new_max[0], s[(m * score_tiles + n) * 4 + r * 2 + c])
        new_max[0] = T.max(new_max[0], _shuffle(new_max[0], 1))
        new_max[0] = T.max(new_max[0], _shuffle(new_max[0], 2))
        # In a row that has kept nothing yet, exp2(-inf - offset) must be 0, which any finite offset gives.
        offset[0] = T.Select(
            new_max[0] == T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)), T.float32(0), new_max[0]
        )
        if folded:
            offset[0] = offset[0] * T.float32(to_exponent)
        rescale[i] = exponential(row_max[state], offset[0])
        row_max[state] = new_max[0]
        row_sum[state] = row_sum[state] * rescale[i]
        for n in T.unroll(score_tiles):
            for c in T.unroll(2):
                si = T.meta_var((m * score_tiles + n) * 4 + r * 2 + c)
                s[si] = exponential(s[si], offset[0])
                row_sum[state] = row_sum[state] + s[si]

    @T.inline
    def set_offset(offset, row_max, r):
        """offset[r] = what `exponential` subtracts for a row's maximum, and any number for -inf."""
        offset[r] = T.Select(
            row_max[r] == T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)), T.float32(0), row_max[r]
        )
        if folded:
            offset[r] = offset[r] * T.float32(to_exponent)

    @T.inline
    def exponentiate_lazily(s, row_max, row_sum, new_max, offset, rescale, moved):
        """As `exponentiate` for both rows of one tile, but maxima stay until they are exceeded by far.

        Until then exp(s - max) is at most 2^STALE, which neither float16 nor the sums notice, and nothing that was
        summed is rescaled.  moved[0] says whether any row of the warp has a new maximum; if none has, rescale is not
        set.  `offset` is kept from block to block: what `set_offset` makes of row_max.
        """
        for r in T.unroll(2):
            new_max[r] = s[r * 2]
            for n in T.unroll(score_tiles):
                for c in T.unroll(2):
                    new_max[r] = T.max(new_max[r], s[n * 4 + r * 2 + c])
        # Each lane looks at its own scores; the four that share a row compare theirs only where it needs a new maximum.
        far = T.meta_var(lambda r: (new_max[r] - row_max[r]) * T.float32(to_exponent) > T.float32(STALE))
        moved[0] = T.cast(T.cuda.any_sync(T.uint32(ALL_LANES), T.Or(far(0), far(1))), "uint32")
        if moved[0] != T.uint32(0):
            for r in T.unroll(2):
                new_max[r] = T.max(new_max[r], _shuffle(new_max[r], 1))
                new_max[r] = T.max(new_max[r], _shuffle(new_max[r], 2))
                new_max[r] = T.max(new_max[r], row_max[r])
                set_offset(offset, new_max, r)
                rescale[r] = exponential(row_max[r], offset[r])
                row_max[r] = new_max[r]
                row_sum[r] = row_sum[r] * rescale[r]
        for r in T.unroll(2):
            for n in T.unroll(score_tiles):
                for c in T.unroll(2):
                    si = T.meta_var(n * 4 + r * 2 + c)
                    s[si] = exponential(s[si], offset[r])
                    row_sum[r] = row_sum[r] + s[si]

    @T.inline
    def scale_rows(o, rescale, i, m, r):
        """Multiply the accumulators of rows r of tile m by rescale[i]."""
        for n in T.unroll(value_tiles):
            for c in T.unroll(2):
                oi = T.meta_var((m * value_tiles + n) * 4 + r * 2 + c)
                o[oi] = o[oi] * rescale[i]

    @T.inline
    def update(s, o, row_max, row_sum):
        """Online softmax: s becomes exp(s - max), and o and row_sum are rescaled to the new maximum."""
        new_max = T.alloc_local([1], "float32")
        offset = T.alloc_local([1], "float32")
        rescale = T.alloc_local([1], "float32")
        for m in T.unroll(row_tiles):
            for r in T.unroll(2):
                exponentiate(s, row_max, row_sum, new_max, offset, rescale, 0, m, r)
                scale_rows(o, rescale, 0, m, r)

    @T.inline
    def weights(first, second, i, first_max, second_max, new_max):
        """Compute first[i] and second[i], the factors that rescale two parts of a row to the larger maximum."""
        offset = T.alloc_local([1], "float32")
        offset[0] = T.Select(new_max == T.reinterpret("float32", T.uint32(NEGATIVE_INFINITY)), T.float32(0), new_max)
        if folded:
            offset[0] = offset[0] * T.float32(to_exponent)
        first[i] = exponential(first_max, offset[0])
        second[i] = exponential(second_max, offset[0])

    @T.inline
    def normalize(o, row_sum):
        """o / row_sum, or 0 for rows that kept nothing; row_sum becomes the whole row's sum."""
        total = T.alloc_local([1], "float32")
        for m in T.unroll(row_tiles):
            for r in T.unroll(2):
                total[0] = row_sum[m * 2 + r]
                total[0] = total[0] + _shuffle(total[0], 1)
                total[0] = total[0] + _shuffle(total[0], 2)
                row_sum[m * 2 + r] = total[0]
                total[0] = T.Select(total[0] == T.float32(0), T.float32(0), T.float32(1) / total[0])
                for n in T.unroll(value_tiles):
                    for c in T.unroll(2):
                        oi = T.meta_var((m * value_tiles + n) * 4 + r * 2 + c)
                        o[oi] = o[oi] * total[0]

    return SimpleNamespace(
        load_keep=load_keep,
        keeps_any=keeps_any,
        mask=mask,
        mask_from=mask_from,
        to_natural=None if folded and problem.softcap is None else to_natural,
        exponentiate=exponentiate,
        set_offset=set_offset,
        exponentiate_lazily=exponentiate_lazily,
        scale_rows=scale_rows,
        update=update,
        weights=weights,
        normalize=normalize,
        natural_scale=natural_scale,
    )
