"""A kernel that orders the block rows of all heads as items of work: long rows first, the longest in parts.

Heads are taken in groups whose keys and values fit the L2 cache.  Rows of a group are sorted by length into classes.
In a class they stay in their order, for neighbours read many of the same keys, and find them in the cache: each warp
has rows that follow one another, and a counter for each class.

Every CTA counts all rows, which takes less time than to wait for what others count, and stores the items of some: those
of the CTAs before it, counted first, say where its own begin.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.block_maps.places import Place
from tir_kernels.attention.block_wise.work import MERGE_KEYS, MOST_SPLITS, SMALLEST_SPLIT_KEYS
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.ptx import ALL_LANES

THREADS = 1024
WARPS = THREADS // WARP
AT_ONCE = 8  # rows of a thread whose lengths are loaded together
HELD = 16  # rows of a thread, at most, whose lengths it keeps: they are loaded once
STORED = 4  # rows of a thread whose items are stored together
CLASSES = 32  # of lengths
MOST_GROUPS = 8
COUNTERS = MOST_GROUPS * CLASSES * WARPS
A_THREAD = COUNTERS // THREADS  # counters that a thread adds up
MOST_CTAS = 16


class Share(NamedTuple):
    """A block row, or a part of one that is split, as expressions of int32."""

    head: Any
    first_row: Any
    begin: Any  # the listed blocks begin … end - 1; those before `full` are partial
    full: Any
    end: Any
    splits: Any  # how many parts the block row has
    split: Any  # which of them this is
    first_slot: Any  # where the parts leave their results: `splits` slots from here on
    first_key: Any  # the first token of the first block


class Limits(NamedTuple):
    """Numbers that the kernel is generated for.

    ctas : int
        What runs at once: a share is split so that none has far more than all blocks over `ctas`.
    heads : int
        Heads of all batch entries.
    rows : int
        Block rows of a head.
    groups : int
        Groups of heads that are computed one after another.
    most : int
        Blocks that a row can have at most.
    """

    ctas: int
    heads: int
    rows: int
    groups: int
    most: int

    @property
    def slots(self) -> int:
        """Slots for results of parts that can be needed: a row that is split has more than a fair share of blocks.

        So there are at most `ctas` of those rows, and their parts are as many as fair shares, and one more for each.
        """
        return 2 * self.ctas


def rows_of_cta(limits: Limits) -> int:
    """The rows of a thread whose items a CTA stores; a CTA's are THREADS times as many."""
    return -(-limits.heads * limits.rows // (THREADS * MOST_CTAS))


def grid_size(limits: Limits) -> int:
    """The number of CTAs."""
    return -(-limits.heads * limits.rows // (THREADS * rows_of_cta(limits)))


@functools.lru_cache(maxsize=64)  # the sections of a long input, and masks alike, have the same
def order(
    block_m: int, block_n: int, limits: Limits, fields: Callable[[Share], dict[int, Any]], unused: int
) -> tvm.tirx.PrimFunc:
    """The kernel; arguments places, counts, entries (as `compaction` leaves them), items.

    items : int32 (heads * block rows + slots + 1, 8)
        `fields` gives an item's fields by their numbers.  What follows the last item has 0 in field `unused`; the last
        row has the number of items in field 0.
    """
    smallest = -(-SMALLEST_SPLIT_KEYS // block_n)
    merge = MERGE_KEYS // block_n
    n_rows = limits.heads * limits.rows
    of_thread = -(-n_rows // THREADS)
    key_bits = (limits.groups * CLASSES - 1).bit_length()
    at_once = of_thread if of_thread <= HELD else AT_ONCE
    batches = -(-of_thread // at_once)
    of_cta, ctas = rows_of_cta(limits), grid_size(limits)

    def parts_of(length, share):
        """How many parts a row of `length` blocks has, as `split_counts` has it."""
        parts = T.Select(length > share + merge, T.truncdiv(length + share - 1, share), 1)
        return T.min(parts, MOST_SPLITS)

    def key_of(row, length):
        """The number of a row's group and class."""
        group = T.truncdiv(T.truncdiv(row, limits.rows) * limits.groups, limits.heads)
        return group * CLASSES + (CLASSES - 1 - T.min(T.truncdiv(length * CLASSES, limits.most + 1), CLASSES - 1))

    def row_of(i, thread):
        """The i-th row of a thread, one of `of_thread`."""
        return T.truncdiv(thread, WARP) * (of_thread * WARP) + i * WARP + thread % WARP

    def exists(i, thread):
        return T.And(i < of_thread, row_of(i, thread) < n_rows)

    def ballot(condition):
        return T.cuda.ballot_sync(T.uint32(ALL_LANES), T.Select(condition, 1, 0))

    @T.inline
    def count(place, counters, row, length, share, thread):
        """Add the parts of a row, whose length is -1 where there is none, to its counter, which was place[0] before.

        All lanes of a warp call it together.  It counts rows of one key in their order, unless one of them is split.
        """
        key = T.alloc_local([1], "int32")
        parts = T.alloc_local([1], "int32")
        alike = T.alloc_local([1], "uint32")  # the lanes whose rows have this key
        found = T.alloc_local([1], "uint32")
        key[0] = key_of(row, T.max(length, 0))
        parts[0] = T.Select(length >= 0, parts_of(length, share), 0)
        alike[0] = ballot(length >= 0)
        for bit in T.unroll(key_bits):
            found[0] = ballot((key[0] >> bit) & 1 != 0)
            alike[0] = alike[0] & (found[0] ^ (T.cast((key[0] >> bit) & 1, "uint32") - T.uint32(1)))
        counter = T.meta_var(key[0] * WARPS + T.truncdiv(thread, WARP))
        found[0] = ballot(parts[0] > 1)
        if found[0] != T.uint32(0):
            if length >= 0:
                place[0] = T.cuda.atomic_add(counters.ptr_to([counter]), parts[0])
        else:
            before = T.meta_var(alike[0] & ((T.uint32(1) << T.cast(thread % WARP, "uint32")) - T.uint32(1)))
            if length >= 0:
                place[0] = counters[counter] + T.cast(T.popcount(before), "int32")
            T.cuda.warp_sync()
            if T.And(length >= 0, before == T.uint32(0)):
                counters[counter] = counters[counter] + T.cast(T.popcount(alike[0]), "int32")
        T.cuda.warp_sync()

    @T.inline
    def sum_of_cta(result, value, sums, thread):
        """result[0] = the sum of the threads' values; `sums` has a number for each warp."""
        result[0] = T.cuda.warp_sum(value)
        T.cuda.cta_sync()
        if thread % WARP == 0:
            sums[thread // WARP] = result[0]
        T.cuda.cta_sync()
        result[0] = T.cuda.warp_sum(sums[thread % WARP])

    @T.inline
    def load(length, counts, batch, thread):
        """The lengths of `at_once` rows, -1 where there is none."""
        # Loads without branches, so that they are under way together: what is past the end is read there again.
        for i in T.unroll(at_once):
            length[i] = counts[T.min(row_of(batch * at_once + i, thread), n_rows - 1), 0]
        for i in T.unroll(at_once):
            length[i] = T.Select(exists(batch * at_once + i, thread), length[i], -1)

    def store(items, at, share: Share):
        given = fields(share)
        values = [T.cast(given[field], "int32") for field in range(8)]
        for first in (0, 4):
            T.evaluate(T.ptx["st.global.v4.b32"](items.ptr_to([at, first]), *values[first : first + 4]))

    @T.jit(private=True)
    def kernel(places_handle: T.handle, counts_handle: T.handle, entries_handle: T.handle, items_handle: T.handle):
        n_entries = T.int32()
        places = T.match_buffer(places_handle, (n_rows + 1, len(Place)), "int32", align=16)
        counts = T.match_buffer(counts_handle, (n_rows, 2), "int32", align=8)
        entries = T.match_buffer(entries_handle, (n_entries, 2), "int32", align=8)
        items = T.match_buffer(items_handle, (n_rows + limits.slots + 1, 8), "int32", align=16)

        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([THREADS])
        counters = T.alloc_buffer((COUNTERS,), "int32", scope="shared")
        sums = T.alloc_buffer((WARPS,), "int32", scope="shared")
        taken = T.alloc_buffer((2,), "int32", scope="shared")  # slots, items
        number = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "int32")
        share = T.alloc_local([1], "int32")
        length = T.alloc_local([max(at_once, STORED)], "int32")
        before = T.alloc_local([A_THREAD], "int32")
        partial = T.alloc_local([STORED], "int32")
        first = T.alloc_local([STORED], "int32")
        place = T.alloc_local([STORED], "int32")
        splits = T.alloc_local([1], "int32")
        at = T.alloc_local([1], "int32")
        slot = T.alloc_local([1], "int32")
        lane = T.meta_var(thread % WARP)
        own = T.meta_var(cta * of_cta)  # the first of a thread's rows whose items this CTA stores
        for i in T.unroll(A_THREAD):
            counters[i * THREADS + thread] = 0
        # A fair share of all blocks.
        number[0] = 0
        for batch in T.serial(batches):
            load(length, counts, batch, thread)
            for i in T.unroll(at_once):
                number[0] = number[0] + T.max(length[i], 0)
        sum_of_cta(total, number[0], sums, thread)
        share[0] = T.max(T.truncdiv(total[0] + (limits.ctas - 1), limits.ctas), smallest)
        # How many items each class and warp has, and how many slots there are, of the rows of CTAs before this one.
        number[0] = 0
        for batch in T.serial(T.truncdiv(own + (at_once - 1), at_once)):
            if batches > 1:
                load(length, counts, batch, thread)
            for i in T.unroll(at_once):
                index = T.meta_var(batch * at_once + i)
                if index < own:
                    count(at, counters, row_of(index, thread), length[i], share[0], thread)
                    splits[0] = parts_of(length[i], share[0])
                    number[0] = number[0] + T.Select(T.And(length[i] >= 0, splits[0] > 1), splits[0], 0)
        sum_of_cta(total, number[0], sums, thread)
        if thread == 0:
            taken[0] = total[0]
        for i in T.unroll(A_THREAD):
            before[i] = counters[thread * A_THREAD + i]
        T.cuda.cta_sync()
        # The same of the other rows.
        for batch in T.serial(batches):
            if (batch + 1) * at_once > own:
                if batches > 1:
                    load(length, counts, batch, thread)
                for i in T.unroll(at_once):
                    index = T.meta_var(batch * at_once + i)
                    if index >= own:
                        count(at, counters, row_of(index, thread), length[i], share[0], thread)
        T.cuda.cta_sync()
        # How many items come before those of each class and warp: sums of what a thread has, of a warp, of the CTA.
        number[0] = 0
        for i in T.unroll(A_THREAD):
            number[0] = number[0] + counters[thread * A_THREAD + i]
        at[0] = number[0]
        for step in T.unroll(5):
            slot[0] = T.tvm_warp_shuffle_up(T.uint32(ALL_LANES), at[0], 1 << step, WARP, WARP)
            if lane >= 1 << step:
                at[0] = at[0] + slot[0]
        T.cuda.cta_sync()
        if lane == WARP - 1:
            sums[thread // WARP] = at[0]
        T.cuda.cta_sync()
        at[0] = at[0] - number[0]
        for i in T.serial(thread // WARP):
            at[0] = at[0] + sums[i]
        for i in T.unroll(A_THREAD):
            number[0] = counters[thread * A_THREAD + i]
            counters[thread * A_THREAD + i] = at[0] + before[i]
            at[0] = at[0] + number[0]
        if thread == THREADS - 1:
            taken[1] = at[0]
        T.cuda.cta_sync()
        # The items.
        for some in T.serial(-(-of_cta // STORED)):
            for i in T.unroll(STORED):
                row = T.meta_var(row_of(own + some * STORED + i, thread))
                length[i] = counts[T.min(row, n_rows - 1), 0]
                partial[i] = counts[T.min(row, n_rows - 1), 1]
                first[i] = places[T.min(row, n_rows - 1), Place.BEGIN]
            for i in T.unroll(STORED):
                index = T.meta_var(some * STORED + i)
                length[i] = T.Select(T.And(index < of_cta, exists(own + index, thread)), length[i], -1)
            for i in T.unroll(STORED):
                count(at, counters, row_of(own + some * STORED + i, thread), length[i], share[0], thread)
                place[i] = at[0]
            for i in T.unroll(STORED):
                if length[i] >= 0:
                    row = T.meta_var(row_of(own + some * STORED + i, thread))
                    splits[0] = parts_of(length[i], share[0])
                    slot[0] = 0
                    if splits[0] > 1:
                        slot[0] = T.cuda.atomic_add(taken.ptr_to([0]), splits[0])
                    for part in T.serial(splits[0]):
                        begin = T.meta_var(first[i] + T.truncdiv(length[i] * part, splits[0]))
                        end = T.meta_var(first[i] + T.truncdiv(length[i] * (part + 1), splits[0]))
                        full = T.meta_var(T.min(T.max(first[i] + partial[i], begin), end))
                        head = T.meta_var(T.truncdiv(row, limits.rows))
                        first_row = T.meta_var(T.truncmod(row, limits.rows) * block_m)
                        first_key = T.meta_var(entries[begin, 0])
                        store(
                            items,
                            place[i] + part,
                            Share(head, first_row, begin, full, end, splits[0], part, slot[0], first_key),
                        )
        at[0] = taken[1] + cta * THREADS + thread
        while at[0] <= n_rows + limits.slots:
            items[at[0], unused] = 0
            at[0] = at[0] + ctas * THREADS
        if T.And(cta == 0, thread == 0):
            items[n_rows + limits.slots, 0] = taken[1]

    return finished(kernel, "block_map_order", [])
