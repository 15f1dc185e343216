"""The rules of block-sparse storage, checked one by one, for masks that come from files or from other programs."""

import numpy as np

from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import TILE, check_block, count_bits, unpack_bitmap
from tir_kernels.masks.token_blocks import token_counts

CHUNK = 4096  # partial blocks unpacked at a time


def validate(mask) -> None:
    """Raise MaskError, naming array, index, value and rule, unless `mask` is a well-formed BlockSparseMask."""
    for name in ("q_len", "kv_len", "token_stride"):
        value = getattr(mask, name)
        if not isinstance(value, (int, np.integer)) or value < 1:
            raise MaskError(f"{name} is {value!r}, must be a positive integer")
    check_block((mask.block_m, mask.block_n))
    _check_dtypes(mask)
    n_rows = _check_row_ptrs(mask)
    full, part, load = (_block_keys(mask, name, n_rows) for name in ("full", "part", "load"))
    _check_load(mask, full, part, load)
    _check_bitmap(mask)
    _check_edges(mask, part, full)
    _check_head_to_mask(mask, n_rows)


def _check_dtypes(mask):
    wanted: dict[str, tuple[type, int]] = {"bitmap": (np.uint64, 2), "head_to_mask": (np.int32, 2)}
    lists = [f"{kind}_{array}" for kind in ("full", "part", "load") for array in ("row_ptr", "col_idx")]
    wanted = {name: (np.int32, 1) for name in lists} | wanted
    for name, (dtype, ndim) in wanted.items():
        array = getattr(mask, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise MaskError(f"{name} is {found}, must be {np.dtype(dtype)} with {ndim} dimension(s)")


def _check_row_ptrs(mask) -> int:
    n_rows = len(mask.load_row_ptr) - 1
    if n_rows < 1 or n_rows % mask.n_block_rows:
        rule = f"must have 1 + a positive multiple of the {mask.n_block_rows} block rows"
        raise MaskError(f"load_row_ptr has {n_rows + 1} entries, {rule}")
    for kind in ("full", "part", "load"):
        name, pointer, end = f"{kind}_row_ptr", getattr(mask, f"{kind}_row_ptr"), len(getattr(mask, f"{kind}_col_idx"))
        if len(pointer) != n_rows + 1:
            raise MaskError(f"{name} has {len(pointer)} entries, must have {n_rows + 1} as load_row_ptr has")
        if pointer[0] != 0:
            raise MaskError(f"{name}[0] is {pointer[0]}, must be 0")
        _refuse(name, pointer[1:], np.diff(pointer) < 0, "must not be less than the entry before it", first=1)
        if pointer[-1] != end:
            raise MaskError(f"{name}[{n_rows}] is {pointer[-1]}, must be {end}, the length of {kind}_col_idx")
    return n_rows


def _block_keys(mask, kind: str, n_rows: int) -> np.ndarray:
    """int64, ascending: block row * n_block_cols + block column of each listed block."""
    name, columns = f"{kind}_col_idx", getattr(mask, f"{kind}_col_idx")
    out_of_range = (columns < 0) | (columns >= mask.n_block_cols)
    _refuse(name, columns, out_of_range, f"must be in 0…{mask.n_block_cols - 1}")
    rows = np.repeat(np.arange(n_rows), np.diff(getattr(mask, f"{kind}_row_ptr")))
    keys = rows * mask.n_block_cols + columns
    _refuse(name, columns[1:], np.diff(keys) <= 0, "must exceed the column before it in its block row", first=1)
    return keys


def _check_load(mask, full, part, load):
    _refuse("part_col_idx", mask.part_col_idx, np.isin(part, full), "is listed as full, too; a block is full or part")
    _refuse("load_col_idx", mask.load_col_idx, ~np.isin(load, np.concatenate([full, part])), "is neither full nor part")
    for kind, keys in (("full", full), ("part", part)):
        columns = getattr(mask, f"{kind}_col_idx")
        _refuse(f"{kind}_col_idx", columns, ~np.isin(keys, load), "is not in load_col_idx, the union of full and part")


def _check_bitmap(mask):
    shape = (len(mask.part_col_idx), mask.block_m // TILE * (mask.block_n // TILE))
    if mask.bitmap.shape != shape:
        raise MaskError(f"bitmap has shape {mask.bitmap.shape}, must have {shape}: partial blocks × tiles of a block")
    kept = count_bits(mask.bitmap)
    _refuse("bitmap", kept, kept == 0, "bits set: an empty block must not be listed")
    _refuse("bitmap", kept, kept == mask.block_m * mask.block_n, "bits set: a full block belongs in full_col_idx")


def _check_edges(mask, part, full):
    """Elements past q_len and kv_len are 0: no block over the edge is full, no bit there is set."""
    row_counts = token_counts(mask.q_len, mask.block_m, mask.token_stride)
    col_counts = token_counts(mask.kv_len, mask.block_n, mask.token_stride)

    def inside(keys):
        """Number of rows and columns of each block that exist."""
        return row_counts[keys // mask.n_block_cols % mask.n_block_rows], col_counts[keys % mask.n_block_cols]

    rows, cols = inside(full)
    over = (rows < mask.block_m) | (cols < mask.block_n)
    _refuse("full_col_idx", mask.full_col_idx, over, "is past q_len or kv_len, so it must be a partial block")
    rows, cols = inside(part)
    edge = np.nonzero((rows < mask.block_m) | (cols < mask.block_n))[0]
    for chunk in np.split(edge, range(CHUNK, len(edge), CHUNK)):
        bits = unpack_bitmap(mask.bitmap[chunk], mask.block_m, mask.block_n)
        below = (bits.any(axis=2) & (np.arange(mask.block_m) >= rows[chunk, None])).any(axis=1)
        beside = (bits.any(axis=1) & (np.arange(mask.block_n) >= cols[chunk, None])).any(axis=1)
        for bad, name, length in ((below, "q_len", mask.q_len), (beside, "kv_len", mask.kv_len)):
            if bad.any():
                block = chunk[bad.argmax()]
                raise MaskError(f"bitmap[{block}] keeps an element past {name}={length}; bits past the edge must be 0")


def _check_head_to_mask(mask, n_rows: int):
    patterns = n_rows // mask.n_block_rows
    if 0 in mask.head_to_mask.shape:
        raise MaskError(f"head_to_mask has shape {mask.head_to_mask.shape}, must have at least one entry")
    flat = mask.head_to_mask.reshape(-1)
    unknown = (flat < 0) | (flat >= patterns)
    _refuse("head_to_mask.flat", flat, unknown, f"must be in 0…{patterns - 1}, a stored pattern")


def _refuse(name: str, values: np.ndarray, bad: np.ndarray, rule: str, first: int = 0):
    """Raise for the first bad value; `first` is the index of values[0] in the array called `name`."""
    if bad.any():
        at = int(bad.argmax())
        raise MaskError(f"{name}[{at + first}] is {values[at]}, {rule}")
