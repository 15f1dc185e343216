"""A kernel that lists the blocks of each block row which both the static mask and a block map keep: a warp a row.

Each row has room for all of its blocks of the mask, so that rows need not wait for one another's lengths.  Kernels that
take several blocks together walk tiles of as many: a row is counted first, for what its tiles lack is listed first.
"""

import functools
import math

import tvm
from tvm.script import tirx as T

from tir_kernels.attention.block_maps.places import READ_AHEAD, Place
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.ptx import ALL_LANES

WARPS = 8  # of a CTA
AT_ONCE = 8  # blocks that a lane looks at before it lists them: their loads are under way together


@functools.lru_cache(maxsize=64)  # the sections of a long input, and masks alike, have the same
def compaction(problem: AttentionProblem, block_n: int, never_empty: bool, together: int = 1) -> tvm.tirx.PrimFunc:
    """The kernel; arguments block_map, places, part_columns, full_columns (see `Places`), entries, counts.

    entries : int32 (room, 2)
        (first token, row of the bitmap or -1 where the block is full) of each listed block, partial ones first, each
        ascending.  After a row's last come up to READ_AHEAD of (0, -1), where there is room.
    counts : int32 (heads * block rows, 2)
        Listed blocks of each row, and how many of them are partial.  If rows are `never_empty`, one without blocks has
        one partial block, whose row of the bitmap follows those of the mask.

    With several blocks `together`, where rows are never empty, counts are of tiles of so many, and of those with
    partial blocks.  Blocks behind all keys fill a row's first tile; their row of the bitmap follows those of the mask,
    and then comes that of full blocks in tiles with partial ones.
    """
    assert together == 1 or never_empty
    given = problem.block_map
    assert given is not None
    map_shape = given.shape(problem.q_len, problem.kv_len)
    columns_in_map = given.block_n // block_n
    behind = -(-problem.kv_len // block_n) * block_n

    @T.inline
    def look(kept, block_map, columns, first, end, row, lane):
        """kept[i] says whether block `first` + 32 i + lane of `columns` is one before `end` that the map keeps."""
        # Loads without branches, so that they are under way together: what is past the end is read there again.
        column = T.alloc_local([AT_ONCE], "int32")
        for i in T.unroll(AT_ONCE):
            column[i] = T.cast(columns[T.min(first + i * WARP + lane, end - 1)], "int32")
        for i in T.unroll(AT_ONCE):
            kept[i] = T.cast(block_map[row + column[i] // columns_in_map], "int32")
        for i in T.unroll(AT_ONCE):
            kept[i] = T.Select(T.And(first + i * WARP + lane < end, kept[i] != 0), column[i], -1)

    @T.inline
    def look_along(kept, block_map, first, end, row, lane):
        """The same of columns that follow one another: kept[i] is column `first` + 32 i + lane, or -1."""
        for i in T.unroll(AT_ONCE):
            kept[i] = T.cast(block_map[row + T.min(first + i * WARP + lane, end - 1) // columns_in_map], "int32")
        for i in T.unroll(AT_ONCE):
            column = T.meta_var(first + i * WARP + lane)
            kept[i] = T.Select(T.And(column < end, kept[i] != 0), column, -1)

    def ballot(condition):
        return T.cuda.ballot_sync(T.uint32(ALL_LANES), T.Select(condition, 1, 0))

    @T.inline
    def tally(count, kept):
        """Count the lane's blocks."""
        for i in T.unroll(AT_ONCE):
            count[0] = count[0] + T.Select(kept[i] >= 0, 1, 0)

    @T.inline
    def append(entries, count, kept, lane, begin, part):
        """List the lanes' blocks; part(i, place) is the row of the bitmap of block i, which is listed at a place."""
        found = T.alloc_local([1], "uint32")
        some = T.alloc_local([1], "int32")
        some[0] = -1
        for i in T.unroll(AT_ONCE):
            some[0] = T.max(some[0], kept[i])
        if ballot(some[0] >= 0) != T.uint32(0):  # of sparse maps most are looked at in vain
            for i in T.unroll(AT_ONCE):
                found[0] = ballot(kept[i] >= 0)
                if kept[i] >= 0:
                    before = T.meta_var(found[0] & ((T.uint32(1) << T.cast(lane, "uint32")) - T.uint32(1)))
                    place = T.meta_var(begin + count[0] + T.cast(T.popcount(before), "int32"))
                    entries[place, 0] = kept[i] * block_n
                    entries[place, 1] = part(i, place)
                count[0] = count[0] + T.cast(T.popcount(found[0]), "int32")

    @T.inline
    def look_at_full(kept, block_map, full_columns, step, place, lane):
        """The same of the row's full blocks, from the step's first one on."""
        if place[Place.FIRST] >= 0:
            first = T.meta_var(place[Place.FIRST] + step * (AT_ONCE * WARP))
            end = T.meta_var(place[Place.FIRST] + place[Place.FULL_END] - place[Place.FULL])
            look_along(kept, block_map, first, end, place[Place.MAP], lane)
        else:
            first = T.meta_var(place[Place.FULL] + step * (AT_ONCE * WARP))
            look(kept, block_map, full_columns, first, place[Place.FULL_END], place[Place.MAP], lane)

    @T.inline
    def count_row(count, kept, block_map, part_columns, full_columns, place, lane):
        """Count what the row at `place` lists."""
        for step in T.serial(T.ceildiv(place[Place.PART_END] - place[Place.PART], AT_ONCE * WARP)):
            first = T.meta_var(place[Place.PART] + step * (AT_ONCE * WARP))
            look(kept, block_map, part_columns, first, place[Place.PART_END], place[Place.MAP], lane)
            tally(count, kept)
        n_columns = T.meta_var(place[Place.FULL_END] - place[Place.FULL])
        for step in T.serial(T.truncdiv(n_columns + (AT_ONCE * WARP - 1), AT_ONCE * WARP)):
            look_at_full(kept, block_map, full_columns, step, place, lane)
            tally(count, kept)
        count[0] = T.cuda.warp_sum(count[0])

    @T.jit(private=True)
    def kernel(
        map_handle: T.handle,
        places_handle: T.handle,
        part_handle: T.handle,
        full_handle: T.handle,
        entries_handle: T.handle,
        counts_handle: T.handle,
    ):
        n_places = T.int32()
        n_part = T.int32()
        n_full = T.int32()
        n_entries = T.int32()
        n_rows = T.int32()
        given_map = T.match_buffer(map_handle, map_shape, "bool", align=1)
        places = T.match_buffer(places_handle, (n_places, len(Place)), "int32", align=16)
        part_columns = T.match_buffer(part_handle, (n_part,), "int32")
        full_columns = T.match_buffer(full_handle, (n_full,), "uint16")
        entries = T.match_buffer(entries_handle, (n_entries, 2), "int32", align=8)
        counts = T.match_buffer(counts_handle, (n_rows, 2), "int32", align=8)
        block_map = T.decl_buffer((math.prod(map_shape),), "bool", data=given_map.data)

        T.device_entry()
        cta = T.cta_id([T.ceildiv(n_rows, WARPS)])
        thread = T.thread_id([WARPS * WARP])
        lane = T.meta_var(thread % WARP)
        row = T.alloc_local([1], "int32")
        row[0] = cta * WARPS + thread // WARP
        if row[0] < n_rows:
            place = T.alloc_local([len(Place)], "int32")
            for i in T.unroll(len(Place)):
                place[i] = places[row[0], i]
            room = T.alloc_local([1], "int32")
            room[0] = places[row[0] + 1, Place.BEGIN] * together
            begin = T.meta_var(place[Place.BEGIN] * together)
            kept = T.alloc_local([AT_ONCE], "int32")
            count = T.alloc_local([1], "int32")
            partial = T.alloc_local([1], "int32")
            count[0] = 0
            if together > 1:
                count_row(count, kept, block_map, part_columns, full_columns, place, lane)
                count[0] = T.Select(count[0] == 0, together, (together - count[0] % together) % together)
                if lane < count[0]:
                    entries[begin + lane, 0] = behind
                    entries[begin + lane, 1] = places[n_rows, Place.PART]
            for step in T.serial(T.ceildiv(place[Place.PART_END] - place[Place.PART], AT_ONCE * WARP)):
                first = T.meta_var(place[Place.PART] + step * (AT_ONCE * WARP))
                look(kept, block_map, part_columns, first, place[Place.PART_END], place[Place.MAP], lane)
                append(entries, count, kept, lane, begin, lambda i, place: first + i * WARP + lane)
            partial[0] = T.truncdiv(count[0] + (together - 1), together)  # tiles
            everything = T.meta_var(places[n_rows, Place.PART] + 1)
            beside = T.meta_var(lambda at: T.Select(at < begin + partial[0] * together, everything, -1))
            full_part = T.meta_var(lambda i, at: T.int32(-1) if together == 1 else beside(at))
            n_columns = T.meta_var(place[Place.FULL_END] - place[Place.FULL])
            for step in T.serial(T.truncdiv(n_columns + (AT_ONCE * WARP - 1), AT_ONCE * WARP)):
                look_at_full(kept, block_map, full_columns, step, place, lane)
                append(entries, count, kept, lane, begin, full_part)
            if never_empty and together == 1:
                if count[0] == 0:
                    count[0] = 1
                    partial[0] = 1
                    if lane == 0:
                        entries[begin, 0] = 0
                        entries[begin, 1] = places[n_rows, Place.PART]
            if lane < READ_AHEAD * together:
                if begin + count[0] + lane < room[0]:
                    entries[begin + count[0] + lane, 0] = 0
                    entries[begin + count[0] + lane, 1] = -1
            if lane == 0:
                counts[row[0], 0] = T.truncdiv(count[0], together)
                counts[row[0], 1] = partial[0]

    return finished(kernel, "block_map_compaction", [])
