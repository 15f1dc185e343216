"""Boxes of a domain: what a CTA computes together where a source does not lie as the results do.

A box is long along the results' last axes and along the axes at whose neighbours the source lies together, so that a
tile of shared memory, filled along the one and emptied along the others, makes long reads and long writes of any
permutation.  What is staged so is affine in the results' indices and has a run of neighbours.  Everything here is
arithmetic on lengths and strides; staging.py and part.py have the code.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import tvm
from tvm import tirx

from tir_kernels.fusion.group.boxes.extents import SHORTEST_RUN, box_extents, last_axis, neighbours
from tir_kernels.fusion.group.boxes.reads import Read, affine_reads
from tir_kernels.fusion.group.domains import Domain
from tir_kernels.fusion.group.problem import GroupProblem, Tensor
from tir_kernels.fusion.problem import DTYPES
from tir_kernels.fusion.steps import VECTOR

MOST_STAGED = 6
MOST_BYTES = 48 << 10  # of shared memory: several CTAs of a multiprocessor keep their loads under way together
RUNS = {1: 128, 2: 64, 4: 64, 8: 32}  # elements that a box is long along either side, by their bytes
FEWEST_BOXES = 264  # two for each multiprocessor of a large GPU, if runs need not be too short for that
SLACK = VECTOR  # elements before a tile, and several times as many after it, that lanes outside of the box read
TILES_TOGETHER = 16  # along the run of the results, before the next along the run of the source


@dataclass(frozen=True)
class Box:
    """How a domain is cut into boxes.

    Attributes
    ----------
    values : tuple of int
        What is computed for each of the domain's results: itself, or what it is a reshape of.
    shape : tuple of int
        The shape of these values.
    extents : tuple of int
        Of a box, along each axis.
    out_axes : tuple of int
        The last axes, outermost first: their elements are a row of the tile, and neighbours in the results.
    in_axes : tuple of int
        The others that a box is longer than 1 along, outermost first: the rows of the tile.
    reads : tuple of Read
        What is staged.
    sizes : tuple of int
        Bytes of an element of each of the reads.
    """

    values: tuple[int, ...]
    shape: tuple[int, ...]
    extents: tuple[int, ...]
    out_axes: tuple[int, ...]
    in_axes: tuple[int, ...]
    reads: tuple[Read, ...]
    sizes: tuple[int, ...]

    @property
    def run(self) -> int:
        """Elements of a row of the tile."""
        return math.prod(self.extents[axis] for axis in self.out_axes)

    @property
    def inner(self) -> int:
        """Neighbours in the results for each step along the outermost of `out_axes`."""
        return math.prod(self.extents[axis] for axis in self.out_axes[1:])

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return math.prod(self.extents[axis] for axis in self.in_axes)

    @property
    def out_strides(self) -> tuple[int, ...]:
        """The results' strides."""
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def counts(self) -> tuple[int, ...]:
        """Boxes along each axis."""
        return tuple(-(-n // extent) for n, extent in zip(self.shape, self.extents))

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """(axis, boxes) in the order of CTAs, innermost first; the outermost of `out_axes` comes in two parts.

        So CTAs that run together lie in a square: their reads and their writes fall on many channels of the memory.
        """
        split = self.out_axes[0]
        groups = -(-self.counts[split] // TILES_TOGETHER)
        together = -(-self.counts[split] // groups)
        others = [axis for axis in (*self.in_axes[::-1], *reversed(range(len(self.shape)))) if axis != split]
        rest = [(axis, self.counts[axis]) for axis in dict.fromkeys(others)]
        return ((split, together), *rest[:1], (split, groups), *rest[1:])

    @property
    def ctas(self) -> int:
        """CTAs, of which a few may lie past the end."""
        return math.prod(count for _, count in self.order)

    @property
    def is_aligned(self) -> bool:
        """Whether the vectors of a box's rows are vectors of the results."""
        outer = [s for axis, s in enumerate(self.out_strides) if axis < self.out_axes[0] and self.shape[axis] > 1]
        ends = self.run, self.shape[self.out_axes[0]] * self.inner
        return all(number % VECTOR == 0 for number in (*outer, *ends))

    @property
    def block(self) -> int | None:
        """After how many elements of a row of the tile one is left out, or None.

        Where the run of the first source is along an axis of `out_axes`, its elements then lie at odd distances.
        """
        stride, along = 1, self.source_run(self.reads[0])[0]
        for axis in self.out_axes[::-1]:
            if axis == along:
                return stride if stride % 2 == 0 else None
            stride *= self.extents[axis]
        return None

    def in_row(self, place):
        """Where in its row of the tile an element is that is the results' neighbour number `place` of the row's."""
        if self.block is None:
            return place
        return place + (place // self.block if isinstance(place, int) else tirx.truncdiv(place, self.block))

    def pitch(self, size: int) -> int:
        """Elements of `size` bytes from a row of the tile to the next: odd, so that columns spread over the banks."""
        return self.in_row(self.run) // 2 * 2 + (5 if size == 1 else 1)

    def tile_strides(self, size: int) -> dict[int, int]:
        """Elements from one to the next in the tile, for each axis of the box."""
        found, stride = {}, 1
        for axis in self.out_axes[::-1]:
            found[axis] = self.in_row(stride)
            stride *= self.extents[axis]
        stride = self.pitch(size)
        for axis in self.in_axes[::-1]:
            found[axis] = stride
            stride *= self.extents[axis]
        return found

    def tile_bytes(self, size: int) -> int:
        """Bytes of a tile, a multiple of 16."""
        return -(-size * (self.rows * self.pitch(size) + 6 * SLACK) // 16) * 16

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each read's tile begins, in bytes."""
        return tuple(sum(self.tile_bytes(size) for size in self.sizes[:i]) for i in range(len(self.sizes)))

    @property
    def shared_bytes(self) -> int:
        """Bytes of all tiles."""
        return sum(map(self.tile_bytes, self.sizes))

    def source_run(self, read: Read) -> list[int]:
        """The axes whose elements in the box are neighbours in the source, innermost first."""
        return neighbours(self.shape, self.extents, read.position.strides)


@cache
def box_of(problem: GroupProblem, domain: Domain) -> Box | None:
    """The boxes of a domain, or None where reading along the results' vectors serves as well."""
    if domain.norm is not None:
        return None
    for values, shape in _spellings(problem, domain):
        if (box := _box(problem, values, shape)) is not None:
            return box
    return None


def _spellings(problem: GroupProblem, domain: Domain) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The domain as it is, and as what its only result is a reshape of: the same elements in the same order."""
    yield domain.results, domain.shape
    if len(domain.results) == 1:
        number, count = domain.results[0], len(problem.sources)
        while number >= count and problem.computed(number).operator == "reshape":
            (number,) = problem.computed(number).arguments
            if number >= count:
                yield (number,), problem.value(number).shape


def _box(problem: GroupProblem, values: tuple[int, ...], shape: tuple[int, ...]) -> Box | None:
    reads = affine_reads(problem, values, shape)
    sources = problem.sources
    wanted = [read for read in reads if _is_wanted(read, shape, sources[read.source].dtype)]
    if not wanted:
        return None
    first = max(wanted, key=lambda read: _distinct(read, shape))
    size = _size(sources[first.source])
    run = RUNS[size]
    while True:
        extents, out_axes = box_extents(shape, first.position.strides, run)
        boxes = math.prod(-(-n // extent) for n, extent in zip(shape, extents))
        if boxes >= FEWEST_BOXES or run <= SHORTEST_RUN:
            break
        run //= 2
    strides = first.position.strides
    rows = [axis for axis, extent in enumerate(extents) if extent > 1 and axis not in out_axes]
    rows.sort(key=lambda axis: -strides[axis])
    box = Box(values, shape, extents, out_axes, tuple(rows), (first,), (size,))
    if not _is_staged(box, first, sources[first.source].dtype):
        return None
    for read in sorted((r for r in reads if r != first), key=lambda read: -_distinct(read, shape)):
        size = _size(sources[read.source])
        fits = len(box.reads) < MOST_STAGED and box.shared_bytes + box.tile_bytes(size) <= MOST_BYTES
        if fits and _is_staged(box, read, sources[read.source].dtype):
            box = replace(box, reads=(*box.reads, read), sizes=(*box.sizes, size))
    return box


def _size(source: Tensor) -> int:
    return -(-tvm.DataType(source.dtype).bits // 8)


def _distinct(read: Read, shape) -> int:
    """Elements that are read."""
    return math.prod(n for n, stride in zip(shape, read.position.strides) if stride)


def _has_vectors(read: Read, shape, dtype: str) -> bool:
    """Whether a vector of the results reads a vector of the source, or one element."""
    position, last = read.position, last_axis(shape)
    if position.strides[last] == 0:
        return True
    others = [stride for axis, stride in enumerate(position.strides) if axis != last]
    are_whole = all(number % VECTOR == 0 for number in (position.base, *others, shape[last]))
    return position.strides[last] == 1 and are_whole and dtype in (*DTYPES, "int32")


def _is_wanted(read: Read, shape, dtype: str) -> bool:
    """Whether a read is worth boxes: one across the vectors, or one of rows that vectors do not fit."""
    strides = read.position.strides
    if not any(stride == 1 for stride in strides) or sum(stride != 0 for stride in strides) < 2:
        return False
    if _has_vectors(read, shape, dtype):
        return False
    crosses = strides[last_axis(shape)] != 1
    if read.guards:
        return crosses and shape[last_axis(shape)] % VECTOR == 0 and _has_uniform_guards(read, shape)
    own = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    is_flat = all(n == 1 or stride == wanted for n, stride, wanted in zip(shape, strides, own))
    return crosses or not is_flat and 4 * _distinct(read, shape) >= math.prod(shape)


def _has_uniform_guards(read: Read, shape) -> bool:
    """Whether all lanes of a vector are on the same side of each guard, as the emitter finds out."""
    last = last_axis(shape)
    for guard in read.guards:
        step = guard.index.strides[last]
        others = [stride for axis, stride in enumerate(guard.index.strides) if axis != last]
        numbers = guard.index.base, guard.extent, *others
        if step != 0 and (step != 1 or any(number % VECTOR for number in numbers)):
            return False
    return True


def _is_staged(box: Box, read: Read, dtype: str) -> bool:
    position, shape = read.position, box.shape
    if box.is_aligned and _has_vectors(read, shape, dtype) or all(position.strides[a] == 0 for a in box.out_axes):
        return False
    if read.guards and not (box.is_aligned and _has_uniform_guards(read, shape)):
        return False
    return bool(box.source_run(read))
