"""Device code that finds a CTA's tile of rows from the offsets of groups: no list of tiles is made on the host."""

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import ALL_LANES
from tir_kernels.fusion.grouped.problem import GroupedProblem

WARP = 32


def group_ends(problem: GroupedProblem):
    """`end_of(offsets, group)`: the end of a group's rows, inside the matrix.

    Also of group -1, which is 0, and of group `groups`, which has the rows of no group.
    """
    groups, m = problem.groups, problem.m

    def end_of(offsets, group):
        offset = T.cast(offsets[T.min(T.max(group, 0), groups - 1)], "int32")
        inside = T.min(T.max(offset, 0), m)
        return T.Select(group < 0, 0, T.Select(group < groups, inside, m))

    return end_of


def row_tile_search(problem: GroupedProblem, block_m: int):
    """`find(found, offsets, tile, lane)`: set found to the group, the first row and the end of a tile of rows.

    Tiles have `block_m` rows of one group, the last of a group may have fewer.  They are counted from group 0 on, and
    group `groups` has the rows of no group.  found[0] is -1 for a tile past the last.  Each warp searches for itself:
    a lane looks at every 32nd group, and a running sum over lanes counts the tiles before its group.
    """
    groups, end_of = problem.groups, group_ends(problem)

    def shuffle(x, lane):
        return T.tvm_warp_shuffle(T.uint32(ALL_LANES), x, lane, WARP, WARP)

    @T.inline
    def find(found, offsets, tile, lane):
        count = T.alloc_local([1], "int32")  # tiles of the groups of this lane and of those before it, this round
        before = T.alloc_local([1], "int32")  # tiles before this round; then those before the tile's group
        mine = T.alloc_local([2], "int32")  # the tile's group, if this lane found it, else -1; the tiles before it
        before[0] = 0
        mine[0] = -1
        mine[1] = 0
        for i in T.serial((groups + WARP) // WARP):
            group = T.meta_var(i * WARP + lane)
            rows = T.meta_var(T.max(end_of(offsets, group) - end_of(offsets, group - 1), 0))
            tiles: T.let = T.Select(group <= groups, (rows + (block_m - 1)) // block_m, 0)
            count[0] = tiles
            for bit in T.unroll(5):
                other: T.let = shuffle(count[0], (lane - (1 << bit)) % WARP)
                count[0] = count[0] + T.Select(lane >= (1 << bit), other, 0)
            first: T.let = before[0] + count[0] - tiles
            if T.And(first <= tile, tile < first + tiles):
                mine[0] = group
                mine[1] = first
            before[0] = before[0] + shuffle(count[0], WARP - 1)
        found[0] = mine[0]
        for bit in T.unroll(5):
            found[0] = T.max(found[0], T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), found[0], 1 << bit, WARP, WARP))
        before[0] = shuffle(mine[1], T.max(found[0], 0) % WARP)
        found[1] = end_of(offsets, found[0] - 1) + (tile - before[0]) * block_m
        found[2] = end_of(offsets, found[0])

    return find
