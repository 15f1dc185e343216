"""Device code that lists the tiles of groups once a CTA, and finds one by its number: for a CTA that takes many tiles.

The list is in shared memory: for each group the number of tiles of rows before it, and its first row.  A thread finds a
tile by bisection, alone, so that warps that copy and warps that multiply each go ahead at their own pace.
"""

from enum import IntEnum
from types import SimpleNamespace

from tvm.script import tirx as T

from tir_kernels.cuda.ptx import ALL_LANES, address
from tir_kernels.fusion.gemm.sizes.geometry import GROUP_M
from tir_kernels.fusion.grouped.find import WARP, group_ends
from tir_kernels.fusion.grouped.problem import GroupedProblem

WORD_BYTES = 4
NONE = 2**31 - 1  # tiles before what is no group


class Tile(IntEnum):
    """The numbers of a tile: its group, its first row, the end of the group's rows, and its first column of w."""

    GROUP = 0
    ROW = 1
    END = 2
    COLUMN = 3


def listed_groups(groups: int) -> int:
    """Entries of the first part of a list: a power of two, more than there are groups."""
    return 1 << groups.bit_length()


def list_bytes(groups: int) -> int:
    """Bytes of shared memory that a list takes."""
    return (listed_groups(groups) + groups + 2) * WORD_BYTES


def tile_list(problem: GroupedProblem, block_m: int, block_n: int, n_tiles: int):
    """Functions of the list at shared address `at`.

    fill(at, offsets, thread)          make the list, in one warp; a barrier must follow
    count(total, at)                   set total[0] to the number of tiles
    find(tile, at, number)             set `tile` to the numbers of a tile, in the order of `Tile`; any for one past the
                                       last

    Group `groups` has the rows of no group.  The tiles of a group follow one another: down `GROUP_M` tiles of rows,
    which share the columns of w, then on to the next columns, so that CTAs that run together share both in the L2
    cache.
    """
    groups, size, end_of = problem.groups, listed_groups(problem.groups), group_ends(problem)
    group_tiles = GROUP_M * n_tiles

    def before(at, group):
        """Address of the number of tiles of rows before a group."""
        return address(at + group * WORD_BYTES)

    def start(at, group):
        """Address of the first row of a group, which is the end of the one before."""
        return address(at + (size + group) * WORD_BYTES)

    def shuffle(x, lane):
        return T.tvm_warp_shuffle(T.uint32(ALL_LANES), x, lane, WARP, WARP)

    def row_tiles(rows):
        return (T.max(rows, 0) + (block_m - 1)) // block_m

    @T.inline
    def fill(at, offsets, thread):
        if thread < WARP:
            tiles = T.alloc_local([1], "int32")  # of the groups of this lane and of those before it, this round
            passed = T.alloc_local([1], "int32")  # of the rounds before
            passed[0] = 0
            if thread == 0:
                T.ptx["st.shared.b32"](before(at, 0), T.int32(0))
                T.ptx["st.shared.b32"](start(at, 0), T.int32(0))
            for i in T.serial((size + WARP - 1) // WARP):
                group = T.meta_var(i * WARP + thread)
                end = end_of(offsets, group)
                tiles[0] = row_tiles(end - end_of(offsets, group - 1))
                for bit in T.unroll(5):
                    other: T.let = shuffle(tiles[0], (thread - (1 << bit)) % WARP)
                    tiles[0] = tiles[0] + T.Select(thread >= (1 << bit), other, 0)
                if group + 1 < size:
                    T.ptx["st.shared.b32"](
                        before(at, group + 1), T.Select(group < groups, passed[0] + tiles[0], T.int32(NONE))
                    )
                if group <= groups:
                    T.ptx["st.shared.b32"](start(at, group + 1), end)
                passed[0] = passed[0] + shuffle(tiles[0], WARP - 1)

    @T.inline
    def count(total, at):
        rest = T.alloc_local([1], "int32")
        T.ptx["ld.shared.b32"](total[0], before(at, groups))
        T.ptx["ld.shared.b32"](rest[0], start(at, groups))
        total[0] = (total[0] + row_tiles(problem.m - rest[0])) * n_tiles

    @T.inline
    def find(tile, at, number):
        word = T.alloc_local([1], "int32")
        tile[Tile.GROUP] = 0
        for i in T.unroll(size.bit_length() - 1):
            step = T.meta_var(size >> (i + 1))
            T.ptx["ld.shared.b32"](word[0], before(at, tile[Tile.GROUP] + step))
            tile[Tile.GROUP] = tile[Tile.GROUP] + T.Select(word[0] <= number // n_tiles, step, 0)
        T.ptx["ld.shared.b32"](word[0], before(at, tile[Tile.GROUP]))
        T.ptx["ld.shared.b32"](tile[Tile.ROW], start(at, tile[Tile.GROUP]))
        T.ptx["ld.shared.b32"](tile[Tile.END], start(at, tile[Tile.GROUP] + 1))
        inside = number - word[0] * n_tiles
        first = inside // group_tiles * GROUP_M
        rows = T.max(1, T.min(GROUP_M, row_tiles(tile[Tile.END] - tile[Tile.ROW]) - first))
        tile[Tile.ROW] = tile[Tile.ROW] + (first + inside % group_tiles % rows) * block_m
        tile[Tile.COLUMN] = inside % group_tiles // rows * block_n

    return SimpleNamespace(fill=fill, count=count, find=find)
