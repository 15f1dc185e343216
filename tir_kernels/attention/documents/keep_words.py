"""A kernel that compares each block with the documents: is all of it kept, nothing, or which elements; a warp a block.

A row of a block keeps the columns between the bounds of its document, of those that the mask inside of documents keeps
by distance alone.  So its bits are a run of ones, and a piece of the bits of all distances: no element is looked at by
itself.
"""

import enum

import numpy as np
import tvm
from tvm.script import tirx as T

from tir_kernels.cuda.device import WARP
from tir_kernels.cuda.finished import finished
from tir_kernels.cuda.prologue import match_optional
from tir_kernels.cuda.ptx import ALL_LANES

WARPS = 8  # of a CTA
WORD = 32
EVERY = 0xFFFFFFFF


class State(enum.IntEnum):
    """What the documents keep of a block."""

    EMPTY = 0
    PART = 1
    FULL = 2


def width(block_m: int, block_n: int, longest: int, length: int) -> int:
    """How many blocks of a block row can keep anything, of documents of up to `longest` of `length` tokens."""
    return min(-(-length // block_n), (block_m + 2 * longest - 3 + block_n) // block_n + 1)


def first_column(row, block_m: int, block_n: int, longest: int):
    """The block column of the first of these blocks, of block row `row`, which may be an expression."""
    return T.truncdiv(T.max(row * block_m - (longest - 1), 0), block_n)


def distance_words(keeps: np.ndarray) -> np.ndarray:
    """The bits of `keeps`, bool (2 * longest - 1,), of distances key - query from 1 - longest on: uint32 (words,).

    Distance 0 is the lowest bit of word `zero_word(longest)`.
    """
    longest = (len(keeps) + 1) // 2
    before = zero_word(longest) * WORD - (longest - 1)
    bits = np.zeros(-(-(before + len(keeps)) // WORD) * WORD, np.uint8)
    bits[before : before + len(keeps)] = keeps
    return np.packbits(bits, bitorder="little").view(np.uint32)


def zero_word(longest: int) -> int:
    """The word of `distance_words` that begins with distance 0."""
    return -(-longest // WORD)


def keep_words(block_m: int, block_n: int, longest: int, has_inside: bool) -> tvm.tirx.PrimFunc:
    """The kernel; arguments bounds, [distances], states, keep_bits.

    bounds : int32 (tokens, 2)
        See `tokens`; no document is longer than `longest`.
    distances : uint32 (words,)
        What `distance_words` makes of the mask inside of documents, if there is one.
    states : int32 (block rows, blocks)
        The State of each block, from `first_column` on; blocks past the last column are empty.
    keep_bits : uint32 (block rows * blocks + 1, block_m / 16, 32, words)
        The bits of blocks that are not empty, in the order of mma accumulators (`lane_keep_bits`).
    """
    words = -(-block_n // 64)
    assert block_m % 16 == 0 and block_n % WORD == 0
    row_tiles = block_m // 16

    def ones(count):
        """The lowest `count` bits of a word; none if it is negative."""
        some = (T.uint32(1) << T.cast(T.min(T.max(count, 0), WORD - 1), "uint32")) - T.uint32(1)
        return T.Select(count >= WORD, T.uint32(EVERY), some)

    def whole(word):
        """What a word of a lane is where all of its columns are kept."""
        return T.Select(word * 64 + WORD < block_n, T.uint32(EVERY), T.uint32(0xFFFF))

    @T.inline
    def find_distances(bits, distances, n_distances, distance):
        """bits[0] keeps the columns of these 32 that `distances` has, the first of which is at `distance`."""
        if has_inside:
            at = T.meta_var(distance + zero_word(longest) * WORD)
            word = T.meta_var(at >> 5)
            low = T.meta_var(distances[T.max(T.min(word, n_distances - 1), 0)])
            high = T.meta_var(distances[T.max(T.min(word + 1, n_distances - 1), 0)])
            shift = T.meta_var(T.cast(at & (WORD - 1), "uint32"))
            # Past either end are columns of no document: what is read there in their place does not count.
            bits[0] = bits[0] & ((low >> shift) | ((high << T.uint32(1)) << (T.uint32(WORD - 1) - shift)))

    @T.inline
    def in_accumulator_order(bits, lane):
        """bits[0] = a lane's two columns of each eight, one pair in each four bits."""
        pairs = T.meta_var((bits[0] >> T.cast(lane % 4 * 2, "uint32")) & T.uint32(0x03030303))
        bits[0] = pairs
        bits[0] = (bits[0] | (bits[0] >> T.uint32(4))) & T.uint32(0x00FF00FF)
        bits[0] = (bits[0] | (bits[0] >> T.uint32(8))) & T.uint32(0x0000FFFF)

    @T.jit(private=True)
    def kernel(
        bounds_handle: T.handle, distances_handle: T.Optional(T.handle), states_handle: T.handle, keep_handle: T.handle
    ):
        n_tokens = T.int32()
        n_distances = T.int32()
        n_rows = T.int32()
        n_blocks = T.int32()
        n_part = T.int32()
        bounds = T.match_buffer(bounds_handle, (n_tokens, 2), "int32", align=8)
        distances = T.meta_var(
            match_optional("distances", distances_handle, (n_distances,) if has_inside else None, "uint32")
        )
        states = T.match_buffer(states_handle, (n_rows, n_blocks), "int32")
        keep_bits = T.match_buffer(keep_handle, (n_part, row_tiles, WARP, words), "uint32", align=16)

        T.device_entry()
        cta = T.cta_id([T.ceildiv(n_rows * n_blocks, WARPS)])
        thread = T.thread_id([WARPS * WARP])
        lane = T.meta_var(thread % WARP)
        block = T.meta_var(cta * WARPS + thread // WARP)
        if block < n_rows * n_blocks:
            row = T.meta_var(T.truncdiv(block, n_blocks))
            top = T.meta_var(row * block_m)
            left = T.alloc_local([1], "int32")
            left[0] = (first_column(row, block_m, block_n, longest) + T.truncmod(block, n_blocks)) * block_n
            state = T.alloc_local([1], "int32")
            state[0] = int(State.EMPTY)
            low = T.meta_var(bounds[top, 0])
            high = T.meta_var(bounds[T.min(top + block_m, n_tokens) - 1, 1])
            if T.And(low < left[0] + block_n, left[0] < high):
                some = T.alloc_local([1], "uint32")
                lacks = T.alloc_local([1], "uint32")
                word = T.alloc_local([words], "uint32")
                bits = T.alloc_local([1], "uint32")
                begin = T.alloc_local([2], "int32")
                end = T.alloc_local([2], "int32")
                some[0] = T.uint32(0)
                lacks[0] = T.uint32(0)
                for m in T.serial(row_tiles):
                    for half in T.unroll(2):
                        token = T.meta_var(top + m * 16 + half * 8 + T.truncdiv(lane, 4))
                        begin[half] = bounds[T.min(token, n_tokens - 1), 0] - left[0]
                        end[half] = T.Select(token < n_tokens, bounds[T.min(token, n_tokens - 1), 1] - left[0], 0)
                    for w in T.unroll(words):
                        word[w] = T.uint32(0)
                    for part in T.unroll(block_n // WORD):
                        for half in T.unroll(2):
                            token = T.meta_var(top + m * 16 + half * 8 + T.truncdiv(lane, 4))
                            bits[0] = ones(end[half] - part * WORD) & ~ones(begin[half] - part * WORD)
                            find_distances(bits, distances, n_distances, left[0] + part * WORD - token)
                            in_accumulator_order(bits, lane)
                            word[part // 2] = word[part // 2] | (bits[0] << T.cast(part % 2 * 16 + half * 2, "uint32"))
                    for w in T.unroll(words):
                        some[0] = some[0] | word[w]
                        lacks[0] = lacks[0] | (word[w] ^ whole(w))
                        keep_bits[block, m, lane, w] = word[w]
                found = T.alloc_local([2], "uint32")
                found[0] = T.cuda.ballot_sync(T.uint32(ALL_LANES), T.Select(some[0] != T.uint32(0), 1, 0))
                found[1] = T.cuda.ballot_sync(T.uint32(ALL_LANES), T.Select(lacks[0] != T.uint32(0), 1, 0))
                if found[0] != T.uint32(0):
                    state[0] = T.Select(found[1] == T.uint32(0), int(State.FULL), int(State.PART))
            if lane == 0:
                states[row, T.truncmod(block, n_blocks)] = state[0]

    return finished(kernel, "document_keep_words", [] if has_inside else ["distances_handle"])
