"""A part of a mask: some of its rows and columns, or of its heads, where an attention has only some of them."""

from stof_tvm.masks.mask import Mask
from stof_tvm.masks.pattern import Pattern
from tir_kernels.errors import MaskError


class Part(Mask):
    """The rows from `q_offset` on and the columns from `kv_offset` on of a mask at the lengths (length, length)."""

    def __init__(self, mask: Mask, q_offset: int, kv_offset: int, length: int):
        self.mask, self.batch, self.heads, self._is_fixed = mask, mask.batch, mask.heads, mask._is_fixed
        self.q_offset, self.kv_offset, self.length = q_offset, kv_offset, length

    def at(self, b, h):
        return Part(self.mask.at(b, h), self.q_offset, self.kv_offset, self.length)

    def bind(self, q_len, kv_len):
        if self.q_offset + q_len > self.length or self.kv_offset + kv_len > self.length:
            raise MaskError(f"{self!r} does not fit (q_len, kv_len) = {(q_len, kv_len)}")
        return _PartPattern(self.mask.bind(self.length, self.length), self.q_offset, self.kv_offset)

    @property
    def _parts(self):
        return Part, self.mask.identity, self.q_offset, self.kv_offset, self.length

    def __repr__(self):
        return f"rows from {self.q_offset} and columns from {self.kv_offset} of {self.mask!r} at {self.length}"


class _Heads(Mask):
    """`count` heads of a mask with a pattern for each, from the head `first` on."""

    def __init__(self, mask: Mask, first: int, count: int):
        self.mask, self.batch, self._is_fixed = mask, mask.batch, mask._is_fixed
        self.first, self.count = first, count
        self.heads, self.has_fixed_places = count if count > 1 else None, mask.has_fixed_places

    def at(self, b, h):
        if self.heads is not None and not 0 <= h < self.count:
            raise IndexError(f"{self!r} has no head {h}")
        return self.mask.at(b, self.first + (0 if self.heads is None else h))

    def bind(self, q_len, kv_len):
        return self.at(0, 0).bind(q_len, kv_len)

    @property
    def _parts(self):
        return _Heads, self.mask.identity, self.first, self.count

    def __repr__(self):
        return f"heads {self.first} to {self.first + self.count - 1} of {self.mask!r}"


def heads_of(mask: Mask, first: int, count: int) -> Mask:
    """The mask of `count` heads, from the head `first` on, of a mask."""
    return mask if mask.heads is None else _Heads(mask, first, count)


class _PartPattern(Pattern):
    def __init__(self, whole: Pattern, q_offset: int, kv_offset: int):
        self.whole, self.q_offset, self.kv_offset = whole, q_offset, kv_offset
        self.elements_at_once = whole.elements_at_once

    def blocks(self, i0, i1, j0, j1, stride):
        q, kv = self.q_offset, self.kv_offset
        return self.whole.blocks(i0 + q, i1 + q, j0 + kv, j1 + kv, stride)

    def keep(self, i, j):
        return self.whole.keep(i + self.q_offset, j + self.kv_offset)

    def bits(self, i, j, stride):
        return self.whole.bits(i + self.q_offset, j + self.kv_offset, stride)
