"""Rules on long inputs: attention in sections of rows, whose maps and lists are never there all at once.

A map has a byte for each block, and a list room for every block that the static mask keeps, eight bytes each: at a
million tokens they would take as much memory as queries, keys, values and the output together.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from stof_tvm.given_masks import GivenMask
from stof_tvm.masks.identity import Identity
from stof_tvm.masks.part import Part
from tir_kernels.attention.problem import BlockMap
from tir_kernels.errors import MaskError

BYTES = 1 + 8  # of a block: in the map, and in a list
LARGE = 1 / 2  # of the bytes of q, k, v and the output: maps and lists beyond that are made in sections
SHARE = 1 / 48  # of these bytes, the most that a section's take
MOST = 128  # sections


class Section(NamedTuple):
    """Some rows of an attention with a rule, or all of them.

    Attributes
    ----------
    given : GivenMask
        The static mask of the rows.
    block_map : Tensor
        Bool (B or 1, H or 1, query blocks, key blocks): what the rule found for the rows.
    block : tuple of int
        Height and width of a block.
    alike : GivenMask or None
        The mask of another section of as many rows, by which the kernel of both is chosen.
    """

    given: GivenMask
    block_map: torch.Tensor
    block: tuple[int, int]
    alike: GivenMask | None = None

    @property
    def described(self) -> BlockMap:
        """The block map as kernels are made for it."""
        (batch, heads), (height, width) = self.block_map.shape[:2], self.block
        return BlockMap(batch, heads, height, width)


def section_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: tuple[int, int], given: GivenMask
) -> int | None:
    """How many query rows are computed at a time, a multiple of the blocks' height; None for all of them at once."""
    if q.shape[2] != k.shape[2] and given.identity is not None:
        return None  # rows of a mask are cut out of a square
    heads, columns = q.shape[0] * q.shape[1], -(-k.shape[2] // block[1])
    block_rows, each = -(-q.shape[2] // block[0]), heads * columns * BYTES
    tensors = q.nbytes + k.nbytes + v.nbytes + heads * q.shape[2] * v.shape[3] * q.element_size()
    if block_rows * each <= LARGE * tensors:
        return None
    most = max(1, int(SHARE * tensors / each), -(-block_rows // MOST))
    rows = 1 << (most.bit_length() - 1)  # a power of two, so that most lengths are cut into equal sections
    rows = rows if rows >= -(-block_rows // MOST) else 2 * rows
    return rows * block[0] if rows < block_rows else None


def in_sections(
    attend_rows: Callable[[torch.Tensor, torch.Tensor | None, Section], tuple[torch.Tensor, ...]],
    of_no_keys: Callable[[torch.Tensor], tuple[torch.Tensor, ...]],
    q: torch.Tensor,
    bias: torch.Tensor | None,
    maps: Callable[[int, int], torch.Tensor],
    block: tuple[int, int],
    given: GivenMask,
    rows: int,
) -> tuple[torch.Tensor, ...]:
    """The results of all rows of q (B, H, Sq, D), `rows` at a time, a multiple of the blocks' height.

    `attend_rows` computes the results of some rows, with their bias and their section: () where their mask keeps
    nothing, for which `of_no_keys` has the results.  maps(first, end) is what the rule finds for these rows of blocks.
    Raises MaskError where no row keeps anything.
    """
    length, empty = q.shape[2], []
    results: tuple[torch.Tensor, ...] = ()
    last = (length // rows - 1) * rows  # the last of the sections of as many rows
    for first in range(0, length, rows):
        end = min(first + rows, length)
        some = q[:, :, first:end]
        alike = _rows_of(given, last if end - first == rows else first, length)
        found_map = maps(first // block[0], -(-end // block[0]))
        section = Section(_rows_of(given, first, length), found_map, block, alike)
        found = attend_rows(some, _bias_rows(bias, first, end), section)
        if not found:
            empty.append((first, end))
            continue
        if not results:
            results = tuple(x.new_empty((*q.shape[:3], *x.shape[3:])) for x in found)
        _put(results, found, first, end)
        del found  # before the next section's takes as much memory
    if not results:
        raise MaskError(f"the mask {given.make()!r} keeps nothing at ({length}, {length})")
    for first, end in empty:
        _put(results, of_no_keys(q[:, :, first:end]), first, end)
    return results


def _put(results: tuple[torch.Tensor, ...], found: tuple[torch.Tensor, ...], first: int, end: int) -> None:
    for whole, part in zip(results, found):
        whole[:, :, first:end] = part


def _bias_rows(bias: torch.Tensor | None, first: int, end: int) -> torch.Tensor | None:
    return bias if bias is None or bias.shape[2] == 1 else bias[:, :, first:end].contiguous()


def _rows_of(given: GivenMask, first: int, length: int) -> GivenMask:
    """The mask of the rows from `first` on of an attention of `length` queries and keys."""
    if given.identity is None:
        return given

    def make():
        mask = given.make()
        assert mask is not None
        return Part(mask, first, 0, length)

    return GivenMask(Identity((Part, given.identity, first, length)), make)
