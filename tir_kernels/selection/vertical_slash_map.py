"""Vertical and slash positions to a block map, on CUDA (sm_80 and up): a CTA a tile of the map.

A CTA marks in shared memory, a byte a block, where positions lie: a position has few blocks in a row of blocks, or on
diagonals, whatever their number.  Then each block of the tile is looked up, four at a time, with what lies there on its
column and on its diagonal.
"""

import functools
import math

import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile  # noqa: F401  the kernel's builds need its compile callback
from tir_kernels.cuda.finished import finished

THREADS = 256
ROWS, COLUMNS = 128, 512  # of a tile, at most
WORD = 4  # blocks that a thread writes together
MARKS = 1 << 13  # bytes for the marks of a tile's width, and for those of its height
FEWEST = 4 * WORD  # columns of a tile


def takes(block: tuple[int, int]) -> bool:
    """Whether there is a kernel for blocks of this height and width, which has room for the marks of a tile.

    There is none where one of both is hundreds of times the other.
    """
    down, across = (size // math.gcd(*block) for size in block)
    return across * FEWEST <= MARKS and down <= MARKS


def tile_of(block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of a tile, powers of two, for blocks that the kernel `takes`."""
    down, across = (size // math.gcd(*block) for size in block)
    rows, columns = ROWS, COLUMNS
    while columns * across > MARKS:
        columns //= 2
    while rows * down > MARKS:
        rows //= 2
    return rows, columns


def _before(n_columns):
    """The most bytes of a row's first word in memory that are the end of the row before."""
    return (n_columns % WORD + (WORD - 1)) // WORD * (WORD - 1)


@functools.cache
def vertical_slash_map(block: tuple[int, int]) -> tvm.tirx.PrimFunc:
    """The kernel for blocks of this height and width; arguments columns, distances, kept, sinks, window, first, length.

    columns : int64 (heads, n)
        Chosen keys, each less `sinks`, in any order; a negative number is none.
    distances : int64 (heads, m)
        Chosen distances i - j, each less `window`, likewise.
    kept : bool (heads, rows, key blocks)
        True for the blocks that hold a pair j <= i of a chosen key or distance.
    sinks, window : int32
        The first keys, and the smallest distances, that are chosen besides, at most `length`.
    first : int32
        The row of blocks that is the first of `kept`.
    length : int32
        How many queries and keys there are.
    """
    height, width = block
    # In units of `step` blocks of row r and column c have the distances around r * down - c * across, their diagonal.
    step = math.gcd(*block)
    down, across = height // step, width // step
    tile_rows, tile_columns = tile_of(block)
    words = tile_columns // WORD
    # A thread's rows are multiples of WORD apart: in all of them a word of memory begins at the same column.
    rows_at_once = THREADS // words
    row_step = max(rows_at_once, WORD)
    # Diagonals whose numbers leave one rest modulo `across` lie side by side, as the blocks of one row want them.
    pitch = -(-(tile_columns + 4 * WORD + (tile_rows - 1) * down // across) // WORD) * WORD
    whole_at = across * pitch  # marks of columns, of the last row of blocks, and of each row's last block
    end_at = whole_at + tile_columns + 2 * WORD
    cut_at = end_at + tile_columns + 2 * WORD
    size = -(-(cut_at + tile_rows) // WORD) * WORD

    @T.inline
    def mark_column(marks, key, row, column, n_rows, length):
        block_of_key = T.meta_var(T.truncdiv(key, width))
        place = T.meta_var(block_of_key - column + WORD)
        if T.And(place >= 0, place < tile_columns + WORD):
            marks[whole_at + place] = T.uint8(1)
        # Rows whose last query ends in this block of keys, at the key or after it.
        ends = T.meta_var(T.Select((block_of_key + 1) * width < length, (block_of_key + 1) * width // height, n_rows))
        begin = T.meta_var(T.max(T.truncdiv(key, height) - row, 0))
        for i in T.serial(T.max(T.min(ends - row, tile_rows) - begin, 0)):
            marks[cut_at + begin + i] = T.uint8(1)

    @T.inline
    def mark_distance(marks, distance, column, place_of_0, n_rows, length):
        """`place_of_0` is that of diagonals 0 … across - 1 among those with their rest."""
        low = T.alloc_local([1], "int32")
        high = T.alloc_local([1], "int32")
        low[0] = T.max(T.truncdiv(distance, step) - (down - 1), across * (place_of_0 - (pitch - 1)))
        high[0] = T.min(T.truncdiv(distance + (step - 1), step) + (across - 1), across * place_of_0 + (across - 1))
        for i in T.serial(T.max(high[0] - low[0] + 1, 0)):
            above = T.meta_var(low[0] + i + across * down)  # not negative
            at = T.meta_var(T.truncmod(above, across) * pitch + place_of_0 - (T.truncdiv(above, across) - down))
            marks[at] = T.uint8(1)
        # The last row of blocks may be cut off: its blocks have no distances as large as their diagonals have.
        low[0] = T.max(T.truncdiv(T.max((n_rows - 1) * height - distance, 0), width), column - WORD)
        high[0] = T.min(T.truncdiv(length - 1 - distance, width), column + (tile_columns - 1))
        for i in T.serial(T.max(high[0] - low[0] + 1, 0)):
            marks[end_at + low[0] + i - column + WORD] = T.uint8(1)

    def four(words, at):
        """Marks `at` … at + 3 as one word, the first in its lowest byte."""
        low, high = (T.cast(words[T.shift_right(at, 2) + i], "uint64") for i in range(2))
        both = T.bitwise_or(low, T.shift_left(high, T.uint64(32)))
        return T.cast(T.shift_right(both, T.cast(8 * T.bitwise_and(at, 3), "uint64")), "uint32")

    @T.jit(private=True)
    def kernel(
        columns_handle: T.handle,
        distances_handle: T.handle,
        kept_handle: T.handle,
        sinks: T.int32,
        window: T.int32,
        first: T.int32,
        length: T.int32,
    ):
        heads = T.int32()
        n = T.int32()
        m = T.int32()
        map_rows = T.int32()
        map_columns = T.int32()
        columns = T.match_buffer(columns_handle, (heads, n), "int64", align=8)
        distances = T.match_buffer(distances_handle, (heads, m), "int64", align=8)
        kept = T.match_buffer(kept_handle, (heads, map_rows, map_columns), "bool", align=4)
        kept_bytes = T.decl_buffer((heads * map_rows * map_columns,), "uint8", data=kept.data)
        kept_words = T.decl_buffer((heads * map_rows * map_columns,), "uint32", data=kept.data)

        T.device_entry()
        across_tiles = T.meta_var(T.truncdiv(map_columns + _before(map_columns) + (tile_columns - 1), tile_columns))
        cta = T.cta_id([heads * across_tiles * T.truncdiv(map_rows + (tile_rows - 1), tile_rows)])
        thread = T.thread_id([THREADS])
        flags = T.alloc_buffer((size // WORD,), "uint32", scope="shared")
        marks = T.decl_buffer((size,), "uint8", data=flags.data, scope="shared")
        head = T.alloc_local([1], "int32")
        row = T.alloc_local([1], "int32")
        column = T.alloc_local([1], "int32")
        place_of_0 = T.alloc_local([1], "int32")
        position = T.alloc_local([1], "int32")
        n_rows = T.meta_var(T.truncdiv(length + (height - 1), height))
        head[0] = T.truncmod(cta, heads)
        row[0] = first + T.truncdiv(T.truncdiv(cta, heads), across_tiles) * tile_rows
        column[0] = T.truncmod(T.truncdiv(cta, heads), across_tiles) * tile_columns
        # Of the tile's last row; rows above have theirs further to the right.
        place_of_0[0] = T.truncdiv((row[0] + (tile_rows - 1)) * down, across) - column[0] + WORD
        for i in T.serial(-(-size // WORD // THREADS)):
            if i * THREADS + thread < size // WORD:
                flags[i * THREADS + thread] = T.uint32(0)
        T.cuda.cta_sync()
        for i in T.serial(T.truncdiv(sinks + n + (THREADS - 1), THREADS)):
            position[0] = i * THREADS + thread
            if position[0] < sinks + n:
                if position[0] >= sinks:
                    position[0] = chosen(T.cast(columns[head[0], position[0] - sinks], "int32"), sinks)
                if position[0] >= 0:
                    mark_column(marks, position[0], row[0], column[0], n_rows, length)
        for i in T.serial(T.truncdiv(window + m + (THREADS - 1), THREADS)):
            position[0] = i * THREADS + thread
            if position[0] < window + m:
                if position[0] >= window:
                    position[0] = chosen(T.cast(distances[head[0], position[0] - window], "int32"), window)
                if position[0] >= 0:
                    mark_distance(marks, position[0], column[0], place_of_0[0], n_rows, length)
        T.cuda.cta_sync()
        begin = T.alloc_local([1], "int64")  # of a row in memory
        at = T.alloc_local([1], "int32")  # its word's first column in the tile
        left = T.alloc_local([1], "int32")  # how far the block in which it ends lies to the right of the word's first
        column_marks = T.alloc_local([1], "uint32")
        word = T.alloc_local([1], "uint32")
        for part in T.unroll(row_step // rows_at_once):
            own = T.meta_var(part * rows_at_once + thread // words)  # the thread's first row, in the tile
            begin[0] = T.cast(head[0] * map_rows + (row[0] - first + own), "int64") * T.cast(map_columns, "int64")
            at[0] = thread % words * WORD - T.cast(T.bitwise_and(begin[0], T.int64(WORD - 1)), "int32")
            if column[0] + at[0] < map_columns:
                column_marks[0] = four(flags, whole_at + at[0] + WORD)
                for i in T.serial(-(-tile_rows // row_step)):
                    in_tile = T.meta_var(i * row_step + own)
                    block_row = T.meta_var(row[0] + in_tile)
                    if T.And(in_tile < tile_rows, block_row - first < map_rows):
                        last = T.meta_var(T.min((block_row + 1) * height, length) - 1)
                        left[0] = T.truncdiv(last, width) - (column[0] + at[0])
                        word[0] = T.uint32(0)
                        if left[0] >= 0:
                            diagonal = T.meta_var(block_row * down)
                            place = T.meta_var(place_of_0[0] + column[0] - T.truncdiv(diagonal, across) + at[0])
                            if block_row < n_rows - 1:
                                word[0] = four(flags, T.truncmod(diagonal, across) * pitch + place)
                            else:
                                word[0] = four(flags, end_at + at[0] + WORD)
                            if left[0] >= WORD:
                                word[0] = word[0] | column_marks[0]
                            else:
                                bits = T.meta_var(T.cast(8 * left[0], "uint32"))
                                before = T.meta_var(T.shift_left(T.uint32(1), bits) - T.uint32(1))
                                word[0] = word[0] | (column_marks[0] & before)
                                word[0] = word[0] | T.shift_left(T.cast(marks[cut_at + in_tile], "uint32"), bits)
                        start = T.meta_var(
                            begin[0]
                            + T.cast(i * row_step, "int64") * T.cast(map_columns, "int64")
                            + T.cast(column[0] + at[0], "int64")
                        )
                        if T.And(column[0] + at[0] >= 0, column[0] + at[0] <= map_columns - WORD):
                            kept_words[T.shift_right(start, T.int64(2))] = word[0]
                        else:
                            # The row's first and last word, of which another row has a part.
                            for b in T.unroll(WORD):
                                if T.And(column[0] + at[0] + b >= 0, column[0] + at[0] + b < map_columns):
                                    kept_bytes[start + T.int64(b)] = T.cast(
                                        T.shift_right(word[0], T.uint32(8 * b)) & T.uint32(255), "uint8"
                                    )

    return finished(kernel, "vertical_slash_map", [])


def chosen(place, forced):
    """A position, or a negative number where it is none."""
    return T.Select(place >= 0, place + forced, -1)
