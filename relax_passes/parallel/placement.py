"""Where the elements of a tensor are when ranks divide it: along one axis, in pieces that are each cut evenly.

    sizes (8, 4, 4) on 2 ranks      q0 q1 q2 q3 q4 q5 q6 q7 | k0 k1 k2 k3 | v0 v1 v2 v3
    rank 0 has                      q0 q1 q2 q3             | k0 k1       | v0 v1

A packed projection of q, k and v is divided so, each part by its heads.  A tensor without a Shard is whole on every
rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class NotShardable(Exception):
    """A value that ranks cannot divide; the message is the reason, for the report."""


class BoxFunctions(NamedTuple):
    """Names of packed functions over boxes of memory, numbered from 0, of each of two ranks; the other writes them.

    inbox, outbox : str
        (number, shape, dtype) to this rank's box, and to the other's, as a tensor.
    arrive : str
        () waits on the stream until what the other rank stored before its own call is here.
    send : str
        (tensor, number) copies a tensor to the other rank's box and does what `arrive` does.
    receive : str
        (tensor, number) copies this rank's box to a tensor.
    """

    inbox: str
    outbox: str
    arrive: str
    send: str
    receive: str


class Mailboxes(Protocol):
    """What gives programs boxes."""

    def boxes(self, count: int, nbytes: int) -> BoxFunctions:
        """The functions of `count` new boxes of so many bytes."""


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, and which one a program is for.

    all_reduce : str
        The name of the packed function that adds up a tensor over the ranks: it takes the tensor and where the sum
        goes, and these may be the same memory.
    all_gather : str
        The name of one that puts a tensor (…) of every rank into (ranks, …), "" where there is none.
    exchange : str
        Of two ranks the name of one that takes a tensor and where the other rank's tensor goes, "" where sums are left
        to `all_reduce`.
    mailboxes : Mailboxes, optional
        Where kernels can store to the other rank's memory: all calls of `exchange` are rewritten then (`StoreToPeer`).
    """

    rank: int
    count: int
    all_reduce: str
    all_gather: str = ""
    exchange: str = ""
    mailboxes: Mailboxes | None = None


@dataclass(frozen=True)
class Shard:
    """The axis along which a tensor is divided, and the sizes of the pieces that make up this axis."""

    axis: int
    sizes: tuple[int, ...]

    def check(self, shape: Sequence[int], count: int) -> None:
        """NotShardable unless a tensor of this shape is divided so among `count` ranks."""
        assert sum(self.sizes) == shape[self.axis], (self, shape)
        for size in self.sizes:
            if size % count:
                raise NotShardable(f"{count} ranks do not divide {size}")

    def moved(self, axis: int) -> "Shard":
        """The same along another axis."""
        return Shard(axis, self.sizes)

    def local_shape(self, shape: Sequence[int], count: int) -> tuple[int, ...]:
        """The shape of a rank's part of a tensor of this shape."""
        return (*shape[: self.axis], shape[self.axis] // count, *shape[self.axis + 1 :])

    def ranges(self, ranks: Ranks) -> list[tuple[int, int]]:
        """(first, end) along the axis of each range that the rank has."""
        found, start = [], 0
        for size in self.sizes:
            part = size // ranks.count
            found.append((start + ranks.rank * part, start + (ranks.rank + 1) * part))
            start += size
        return found

    def part(self, first: int, end: int) -> "Shard":
        """The pieces from `first` to `end` along the axis; NotShardable where a piece is not whole in there."""
        sizes, start = [], 0
        for size in self.sizes:
            if first <= start and start + size <= end:
                sizes.append(size)
            elif start < end and first < start + size:
                raise NotShardable("a slice cuts what the ranks divide")
            start += size
        return Shard(self.axis, tuple(sizes))


def reshaped(shard: Shard, old: Sequence[int], new: Sequence[int], count: int) -> Shard:
    """The Shard of a tensor after a reshape from `old` to `new`; NotShardable where it has none."""
    (first, end), (new_first, new_end) = _group(shard.axis, old, new)
    outer = math.prod(old[first : shard.axis])
    inner = math.prod(old[shard.axis + 1 : end])
    flat = tuple(size * inner for size in shard.sizes) * outer
    for axis in range(new_first, new_end):
        outer, inner = math.prod(new[new_first:axis]), math.prod(new[axis + 1 : new_end])
        pieces = flat[: len(flat) // outer]
        if len(flat) % outer == 0 and pieces * outer == flat and sum(pieces) == new[axis] * inner:
            if all(size % (inner * count) == 0 for size in pieces):
                return Shard(axis, tuple(size // inner for size in pieces))
    raise NotShardable(f"a reshape from {tuple(old)} to {tuple(new)} mixes what the ranks divide")


def _group(axis: int, old: Sequence[int], new: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The least ranges of axes of two shapes that have the same elements, such that the old one has `axis`."""
    i = j = 0
    while True:
        first, new_first = i, j
        product, new_product = old[i] if i < len(old) else 1, new[j] if j < len(new) else 1
        i, j = i + 1, j + 1
        while product != new_product:
            if product < new_product:
                product, i = product * old[i], i + 1
            else:
                new_product, j = new_product * new[j], j + 1
        if first <= axis < i:
            # Axes of one element may belong to either side of a border.
            return (first, min(i, len(old))), (min(new_first, len(new)), min(j, len(new)))
