"""From a lazy mask to arrays, block-sparse or dense, and a cache of those that were compiled."""

import reprlib

import numpy as np
import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.walking.block_rows import walk
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import check_block
from tir_kernels.masks.block_sparse import BlockLists, BlockSparseMask

CHUNK_ELEMENTS = 1 << 20  # elements of rows held at a time
CACHE_BYTES, CACHE_ENTRIES = 256 << 20, 4096
LARGEST_BLOCK = 1 << 12
LONGEST = 1 << 26  # far above any length; arrays of this length still fit in memory


def check_lengths(q_len: int, kv_len: int | None) -> tuple[int, int]:
    """Both lengths, kv_len defaulting to q_len; MaskError unless they are positive integers up to LONGEST."""
    kv_len = q_len if kv_len is None else kv_len
    for name, length in (("q_len", q_len), ("kv_len", kv_len)):
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)) or length < 1:
            raise MaskError(f"{name}={reprlib.repr(length)} must be a positive integer")
        if length > LONGEST:
            raise MaskError(f"{name}={reprlib.repr(length)} must be at most {LONGEST}")
    return int(q_len), int(kv_len)


def compile_mask(
    mask, q_len: int, kv_len: int | None, block: tuple[int, int], token_stride: int = 1
) -> BlockSparseMask:
    """The mask in block-sparse storage; equal requests get the same object while the cache holds it."""
    block, token_stride = check_block(block), check_int("token_stride", token_stride, least=1, largest=LONGEST)
    if max(block) > LARGEST_BLOCK:
        raise MaskError(f"a block of {reprlib.repr(block)} is too large: its sides may be up to {LARGEST_BLOCK}")
    request = (*check_lengths(q_len, kv_len), block, token_stride)
    key = (mask.identity, *request)
    return _cache.get(key) or _cache.put(key, _compile(mask, *request))


def _compile(mask, q_len: int, kv_len: int, block: tuple[int, int], stride: int) -> BlockSparseMask:
    numbers, digests, patterns = {}, {}, []
    head_to_mask = np.zeros((mask.batch or 1, mask.heads or 1), np.int32)
    for (b, h), (identity, entry) in _entries(mask).items():
        if identity not in numbers:
            lists = BlockLists.stack(list(walk(entry.bind(q_len, kv_len), q_len, kv_len, block, stride)))
            # Masks that are spelled differently may still keep the same.
            numbers[identity] = digests.setdefault(lists.digest(), len(patterns))
            if numbers[identity] == len(patterns):
                patterns.append(lists)
        head_to_mask[b, h] = numbers[identity]
    return BlockSparseMask.from_lists(q_len, kv_len, block, patterns, head_to_mask, stride)


def _entries(mask) -> dict:
    """(identity, mask) by (b, h), all identities taken before anything is evaluated."""
    entries = ((at, mask.at(*at)) for at in np.ndindex(mask.batch or 1, mask.heads or 1))
    return {at: (entry.identity, entry) for at, entry in entries}


def dense_mask(mask, q_len: int, kv_len: int | None) -> torch.Tensor:
    """Boolean (q_len, kv_len), or (batch or 1, heads or 1, q_len, kv_len) where the mask depends on either."""
    q_len, kv_len = check_lengths(q_len, kv_len)
    out = np.empty((mask.batch or 1, mask.heads or 1, q_len, kv_len), np.bool_)
    done = {}
    for (b, h), (identity, entry) in _entries(mask).items():
        if identity in done:
            out[b, h] = out[done[identity]]
            continue
        done[identity] = b, h
        pattern = entry.bind(q_len, kv_len)
        j = np.arange(kv_len)[None]
        rows = max(1, CHUNK_ELEMENTS // kv_len)
        for first in range(0, q_len, rows):
            i = np.arange(first, min(first + rows, q_len))[None]
            out[b, h, i[0]] = pattern.keep(i, j)[0]
    return torch.from_numpy(out if mask.batch or mask.heads else out[0, 0])


def _size(compiled: BlockSparseMask) -> int:
    """Bytes of a compiled mask's arrays, and of the arrays that it derives from them on demand."""
    derived = compiled.load_row_ptr.nbytes + compiled.load_col_idx.nbytes
    return sum(array.nbytes for array in compiled.arrays.values()) + derived


_cache: BoundedCache[BlockSparseMask] = BoundedCache(_size, CACHE_BYTES, CACHE_ENTRIES)
