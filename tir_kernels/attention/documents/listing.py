"""A kernel that lists the blocks of each block row by what documents keep of them: a warp a row of a head."""

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.block_maps.places import READ_AHEAD
from tir_kernels.attention.documents.keep_words import State, first_column
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.ptx import ALL_LANES

WARPS = 8  # of a CTA


def listing(block_m: int, block_n: int, longest: int, never_empty: bool) -> tvm.tirx.PrimFunc:
    """The kernel; arguments states (as `keep_words` leaves them), entries, counts.

    entries : int32 (heads * block rows * blocks + READ_AHEAD, 2)
        (first token, row of the keep bits or -1 where the block is full) of each listed block, partial ones first, each
        ascending.  Row r of head h begins at entry (h * block rows + r) * blocks.  After its last come up to READ_AHEAD
        of (0, -1), where there is room.
    counts : int32 (heads * block rows, 2)
        Listed blocks of each row, and how many of them are partial.  If rows are `never_empty`, one without blocks has
        one partial block, whose row of the keep bits follows all others.
    """

    @T.inline
    def list_blocks(entries, count, states, state, wanted, row, n_blocks, lane, begin, column, slot):
        """List the blocks of a row that have a state."""
        for step in T.serial(T.ceildiv(n_blocks, WARP)):
            first = T.meta_var(step * WARP)
            state[0] = int(State.EMPTY)
            if first + lane < n_blocks:
                state[0] = states[row, first + lane]
            found = T.alloc_local([1], "uint32")
            found[0] = T.cuda.ballot_sync(T.uint32(ALL_LANES), T.Select(state[0] == wanted, 1, 0))
            if state[0] == wanted:
                before = T.meta_var(found[0] & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
                place = T.meta_var(begin + count[0] + T.cast(T.popcount(before), "int32"))
                entries[place, 0] = (column + first + lane) * block_n
                entries[place, 1] = slot + first + lane if wanted == State.PART else -1
            count[0] = count[0] + T.cast(T.popcount(found[0]), "int32")

    @T.jit(private=True)
    def kernel(states_handle: T.handle, entries_handle: T.handle, counts_handle: T.handle):
        n_rows = T.int32()
        n_blocks = T.int32()
        n_entries = T.int32()
        n_counts = T.int32()
        states = T.match_buffer(states_handle, (n_rows, n_blocks), "int32")
        entries = T.match_buffer(entries_handle, (n_entries, 2), "int32", align=8)
        counts = T.match_buffer(counts_handle, (n_counts, 2), "int32", align=8)

        T.device_entry()
        cta = T.cta_id([T.ceildiv(n_counts, WARPS)])
        thread = T.thread_id([WARPS * WARP])
        lane = T.meta_var(thread % WARP)
        number = T.meta_var(cta * WARPS + thread // WARP)
        if number < n_counts:
            row = T.meta_var(T.truncmod(number, n_rows))
            begin = T.meta_var(number * n_blocks)
            room = T.meta_var(T.Select(number == n_counts - 1, n_entries, begin + n_blocks))
            column = T.meta_var(first_column(row, block_m, block_n, longest))
            slot = T.meta_var(row * n_blocks)
            state = T.alloc_local([1], "int32")
            count = T.alloc_local([1], "int32")
            partial = T.alloc_local([1], "int32")
            count[0] = 0
            list_blocks(entries, count, states, state, int(State.PART), row, n_blocks, lane, begin, column, slot)
            partial[0] = count[0]
            list_blocks(entries, count, states, state, int(State.FULL), row, n_blocks, lane, begin, column, slot)
            if never_empty:
                if count[0] == 0:
                    count[0] = 1
                    partial[0] = 1
                    if lane == 0:
                        entries[begin, 0] = 0
                        entries[begin, 1] = n_rows * n_blocks
            if lane < READ_AHEAD:
                if begin + count[0] + lane < room:
                    entries[begin + count[0] + lane, 0] = 0
                    entries[begin + count[0] + lane, 1] = -1
            if lane == 0:
                counts[number, 0] = count[0]
                counts[number, 1] = partial[0]

    return finished(kernel, "document_listing", [])
