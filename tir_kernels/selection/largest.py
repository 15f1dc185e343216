"""The k largest of each row of scores, on CUDA (sm_80 and up): a CTA a row, which finds the k-th by its digits.

The scores, as numbers that order as they do, are cut into four digits of 8 bits.  From the highest on, the CTA counts
how many have each digit among those that agree with the k-th in the digits before.  No sort, and the result is always
the same: of equal scores the first are taken.
"""

import functools

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.ptx import ALL_LANES

THREADS = 256
WARPS = THREADS // WARP
BITS = 8  # of a digit: as many values as threads
DIGITS = 4
INFINITY = 0x7F800000  # its bits
NAN_KEY, MINUS_INFINITY_KEY = 0xFFFFFFFF, 0x007FFFFF


@functools.cache
def largest() -> tvm.tirx.PrimFunc:
    """The kernel; arguments scores, kept, k.

    scores : float32 (rows, n)
        NaN is larger than any number, and -0 equals 0.
    kept : bool (rows, n)
        True for the k largest of each row, all where there are not more; never for one of -inf.
    k : int32
        At least 1.
    """

    def key(score):
        """The score as a number without sign that orders as scores do."""
        bits = T.reinterpret("uint32", score)
        size = bits & T.uint32(0x7FFFFFFF)
        number = T.Select(bits == size, bits ^ T.uint32(0x80000000), ~bits)
        number = T.Select(size == T.uint32(0), T.uint32(0x80000000), number)
        return T.Select(size > T.uint32(INFINITY), T.uint32(NAN_KEY), number)

    @T.inline
    def count(counts, sums, found, wanted, thread, lane):
        """found becomes [the digit of the wanted-th, how many with it are wanted, how many have it]."""
        own = T.alloc_local([1], "int32")
        up = T.alloc_local([1], "int32")
        through = T.alloc_local([1], "int32")
        own[0] = counts[THREADS - 1 - thread]  # thread 0 has the largest digit
        through[0] = own[0]
        for step in T.unroll(5):
            up[0] = T.tvm_warp_shuffle_up(T.uint32(ALL_LANES), through[0], 1 << step, WARP, WARP)
            if lane >= 1 << step:
                through[0] = through[0] + up[0]
        if lane == WARP - 1:
            sums[thread // WARP] = through[0]
        T.cuda.cta_sync()
        for warp in T.serial(thread // WARP):
            through[0] = through[0] + sums[warp]
        if T.And(through[0] - own[0] < wanted, wanted <= through[0]):
            found[0] = THREADS - 1 - thread
            found[1] = wanted - (through[0] - own[0])
            found[2] = own[0]
        T.cuda.cta_sync()

    @T.jit(private=True)
    def kernel(scores_handle: T.handle, kept_handle: T.handle, k: T.int32):
        rows = T.int32()
        n = T.int32()
        scores = T.match_buffer(scores_handle, (rows, n), "float32")
        kept = T.match_buffer(kept_handle, (rows, n), "bool", align=1)

        T.device_entry()
        row = T.cta_id([rows])
        thread = T.thread_id([THREADS])
        counts = T.alloc_buffer((THREADS,), "int32", scope="shared")
        sums = T.alloc_buffer((WARPS,), "int32", scope="shared")
        found = T.alloc_buffer((3,), "int32", scope="shared")
        lane = T.meta_var(thread % WARP)
        wanted = T.alloc_local([1], "int32")
        prefix = T.alloc_local([1], "uint32")
        mine = T.alloc_local([1], "uint32")
        wanted[0] = T.min(k, n)
        prefix[0] = T.uint32(0)
        for digit in T.unroll(DIGITS):
            shift = T.meta_var(BITS * (DIGITS - 1 - digit))
            counts[thread] = 0
            T.cuda.cta_sync()
            for step in T.serial(T.truncdiv(n + (THREADS - 1), THREADS)):
                if step * THREADS + thread < n:
                    mine[0] = key(scores[row, step * THREADS + thread])
                    # Of 64 bits: all of 32 are shifted away at first.
                    if T.shift_right(T.cast(mine[0], "uint64"), T.cast(shift + BITS, "uint64")) == T.cast(
                        prefix[0], "uint64"
                    ):
                        place = T.meta_var(T.cast((mine[0] >> T.cast(shift, "uint32")) & T.uint32(255), "int32"))
                        T.evaluate(T.cuda.atomic_add(counts.ptr_to([place]), T.int32(1)))
            T.cuda.cta_sync()
            count(counts, sums, found, wanted[0], thread, lane)
            prefix[0] = (prefix[0] << T.uint32(BITS)) | T.cast(found[0], "uint32")
            wanted[0] = found[1]
        # What equals the k-th is kept as long as `wanted` allows, the first ones first.
        equal = T.alloc_local([1], "uint32")
        before = T.alloc_local([1], "int32")
        before[0] = 0
        for step in T.serial(T.truncdiv(n + (THREADS - 1), THREADS)):
            mine[0] = T.uint32(0)
            if step * THREADS + thread < n:
                mine[0] = key(scores[row, step * THREADS + thread])
            equal[0] = T.uint32(0)
            if found[2] > wanted[0]:
                equal[0] = T.cuda.ballot_sync(
                    T.uint32(ALL_LANES),
                    T.Select(T.And(mine[0] == prefix[0], step * THREADS + thread < n), 1, 0),
                )
                if lane == 0:
                    sums[thread // WARP] = T.cast(T.popcount(equal[0]), "int32")
                T.cuda.cta_sync()
                for warp in T.serial(thread // WARP):
                    before[0] = before[0] + sums[warp]
                lower = T.meta_var((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
                before[0] = before[0] + T.cast(T.popcount(equal[0] & lower), "int32")
            if step * THREADS + thread < n:
                is_first = T.meta_var(T.And(mine[0] == prefix[0], before[0] < wanted[0]))
                is_kept = T.meta_var(T.Or(mine[0] > prefix[0], is_first))
                is_number = T.meta_var(mine[0] != T.uint32(MINUS_INFINITY_KEY))
                kept[row, step * THREADS + thread] = T.And(is_kept, is_number)
            if found[2] > wanted[0]:
                lower = T.meta_var((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1))
                before[0] = before[0] - T.cast(T.popcount(equal[0] & lower), "int32")
                for warp in T.serial(thread // WARP, WARPS):
                    before[0] = before[0] + sums[warp]
                T.cuda.cta_sync()

    return finished(kernel, "largest_of_rows", [])
