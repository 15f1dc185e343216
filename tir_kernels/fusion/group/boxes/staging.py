"""Code of a box's tiles in shared memory: filled along the source, a word at a time, and read by the results' lanes.

The threads of a warp read neighbouring words.  Where a run of the source begins at no multiple of a word, its words
are those that cover it, and elements before and after it are dropped.  Words past either end of the source are the
nearest ones, and the few elements after its last whole word are read one by one: nothing is read that is not there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.group.boxes.box import SLACK, Box
from tir_kernels.fusion.group.boxes.reads import Read
from tir_kernels.fusion.group.emit import all_of, assign, branch, load_words, where
from tir_kernels.fusion.group.problem import Tensor
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import VECTOR, Words

WORD = 4  # bytes
MOST_WORDS = 18  # registers of a thread for words that are under way together


@dataclass(frozen=True)
class Tile:
    """A read's tile: how its words are numbered, and where its elements lie in shared memory."""

    box: Box
    read: Read
    source: Tensor
    size: int
    threads: int

    @property
    def each(self) -> int:
        """Elements of a word that is read."""
        return max(1, WORD // self.size)

    @property
    def run_axes(self) -> list[int]:
        """Axes of neighbours in the source, innermost first."""
        return self.box.source_run(self.read)

    @property
    def run(self) -> int:
        """Neighbours in the source."""
        return math.prod(self.box.extents[axis] for axis in self.run_axes)

    @property
    def other_axes(self) -> list[int]:
        """The other axes of the box, innermost first: each of their places is a run."""
        used = (*self.box.out_axes[::-1], *self.box.in_axes[::-1])
        return [axis for axis in used if axis not in self.run_axes]

    @property
    def is_aligned(self) -> bool:
        """Whether runs are whole words wherever the box is."""
        position, axes = self.read.position, self.run_axes
        steps = [s * (self.box.extents[a] if a in axes else 1) for a, s in enumerate(position.strides)]
        # Within a run, boxes begin at multiples of their extents.
        starts = [steps[a] for a in range(len(steps)) if a not in axes or self.box.counts[a] > 1]
        return all(number % self.each == 0 for number in (position.base, *starts, self.run))

    @property
    def words(self) -> int:
        """Words that cover a run."""
        return self.run // self.each if self.is_aligned else -(-(self.run + self.each - 1) // self.each)

    @property
    def total(self) -> int:
        """Words of the box."""
        return self.words * math.prod(self.box.extents[axis] for axis in self.other_axes)

    @property
    def steps(self) -> int:
        """Words of a thread."""
        return -(-self.total // self.threads)

    @property
    def registers(self) -> int:
        """32-bit registers of a thread's words."""
        return self.steps * max(1, self.size // WORD)


def fill(tiles: Sequence[Tile], sources, views, corner: Sequence, thread) -> None:
    """Fill all tiles; `corner` are the indices of the box's first element, `views` the tiles' shared memory.

    The words of all tiles are under way together if a thread's registers hold them.
    """
    together = sum(tile.registers for tile in tiles) <= MOST_WORDS
    pending = []
    for tile, view in zip(tiles, views, strict=True):
        filling = _Filling(tile, sources[tile.read.source], view, corner, thread)
        rounds = -(-tile.registers // MOST_WORDS)
        each = -(-tile.steps // rounds)
        parts = [range(first, min(first + each, tile.steps)) for first in range(0, tile.steps, each)]
        for part in parts:
            filling.load(part)
            if together:
                pending.append((filling, part))
            else:
                filling.store(part)
    for filling, part in pending:
        filling.store(part)


class _Filling:
    def __init__(self, tile: Tile, buffer, view, corner: Sequence, thread):
        self.tile, self.buffer, self.view, self.thread = tile, buffer, view, thread
        read, box = tile.read, tile.box
        self.strides = box.tile_strides(tile.size)
        start = T.int32(read.position.base)
        for index, stride in zip(corner, read.position.strides):
            start = start + index * stride if stride else start
        self.start = scalar("start", start)
        conditions = [condition for guard in read.guards for condition in self._reached(guard, corner)]
        self.is_read = [scalar("is_read", T.cast(all_of(conditions), "int32")) > 0] if conditions else []
        self.places: dict[int, tuple] = {}
        self.words = local_buffers("word", 1, tile.registers, "uint32")[0]

    def _reached(self, guard, corner) -> list:
        """The conditions that any of the box may fulfil the guard."""
        lowest = highest = guard.index.base
        for axis, stride in enumerate(guard.index.strides):
            if stride:
                far = stride * (self.tile.box.extents[axis] - 1)
                lowest = lowest + corner[axis] * stride + min(far, 0)
                highest = highest + corner[axis] * stride + max(far, 0)
        return [condition for condition in (highest >= 0, lowest < guard.extent) if not isinstance(condition, bool)]

    def load(self, steps: range) -> None:
        """Read words to registers."""
        places = {step: self._place(step) for step in steps}

        def load_all():
            for step, first in places.items():
                self._load(step, first)

        where(self.is_read, load_all)

    def store(self, steps: range) -> None:
        """Write the elements of these words to shared memory."""

        def store_all():
            for step in steps:
                self._store(step)

        where(self.is_read, store_all)

    def _number(self, step: int):
        """(the word's number in the box, conditions that it is one)."""
        tile = self.tile
        number = self.thread + step * tile.threads if step else self.thread
        inside = [number < tile.total] if (step + 1) * tile.threads > tile.total else []
        return number, inside

    def _place(self, step: int):
        """The number of the word in the source; where its elements belong is kept for `_store`."""
        tile = self.tile
        number, inside = self._number(step)
        if inside:
            number = T.min(number, tile.total - 1)
        word = scalar("word_of_run", T.truncmod(number, tile.words))
        others = scalar("run", T.truncdiv(number, tile.words))
        place, offset = self.start, T.int32(SLACK)
        for axis, index in self._decoded(tile.other_axes, others):
            stride = tile.read.position.strides[axis]
            place = place + index * stride if stride else place
            offset = offset + index * self.strides[axis]
        place, each = scalar("place", place), tile.each
        # The first element of the word, counted from the run's.
        before = word * each if tile.is_aligned else word * each - (place & (each - 1))
        self.places[step] = scalar("element", before), scalar("offset", offset)
        return scalar("first", (place >> each.bit_length() - 1) + word if each > 1 else place + word)

    def _load(self, step: int, first) -> None:
        each, elements = self.tile.each, math.prod(self.tile.source.shape)
        whole, ends = elements // each, elements % each
        if not whole:
            self._read_ends(step, 0, ends)
            return
        at = scalar("at", T.max(T.min(first, whole - 1), 0) * each)
        registers = self.tile.registers // self.tile.steps
        words = Words(self.words, step * registers)
        read = lambda: load_words(words, registers, lambda _: self.buffer.ptr_to([at]))
        if ends:
            branch(first < whole, read, lambda: self._read_ends(step, whole * each, ends))
        else:
            read()

    def _read_ends(self, step: int, first: int, count: int) -> None:
        """The elements after the last whole word, as a word."""
        word = T.uint32(0)
        for i in range(count):
            bits = T.cast(as_bits(self.buffer[first + i], self.tile.size), "uint32")
            word = word | bits << T.uint32(8 * self.tile.size * i)
        assign(self.words, step, word)

    def _store(self, step: int) -> None:
        tile = self.tile
        _, inside = self._number(step)
        element, offset = self.places[step]

        def put():
            for i in range(tile.each):
                at = element + i if i else element
                is_covered = [] if tile.is_aligned else [at >= 0, at < tile.run]
                where(is_covered, lambda at=at, i=i: assign(self.view, self._in_tile(at, offset), self._bits(step, i)))

        where(inside, put)

    def _in_tile(self, element, offset):
        """Where an element of a run lies in the tile."""
        axes, strides, extents = self.tile.run_axes, self.strides, self.tile.box.extents
        if all(strides[b] == strides[a] * extents[a] for a, b in zip(axes, axes[1:])):
            return offset + element * strides[axes[0]]
        for axis, index in self._decoded(axes, element):
            offset = offset + index * strides[axis]
        return offset

    def _decoded(self, axes: Sequence[int], number) -> list[tuple]:
        """(axis, index) of each of the box's axes, of which the first is innermost, at a number."""
        found, extents = [], self.tile.box.extents
        for i, axis in enumerate(axes):
            index = number
            if (inner := math.prod(extents[a] for a in axes[:i])) > 1:
                index = T.truncdiv(index, inner)
            if i + 1 < len(axes):
                index = T.truncmod(index, extents[axis])
            found.append((axis, index))
        return found

    def _bits(self, step: int, i: int):
        """The bits of element i of a word, as an integer of its size."""
        if self.tile.size == 2 * WORD:
            low, high = (T.cast(self.words[2 * step + half], "uint64") for half in (0, 1))
            return high << T.uint64(32) | low
        word = self.words[step]
        return T.cast(word >> T.uint32(8 * self.tile.size * i) if i else word, f"uint{8 * self.tile.size}")


def as_bits(x, size: int):
    """A value of `size` bytes as an unsigned integer of that size; a boolean is 0 or 1."""
    return T.cast(x, "uint8") if str(x.ty.dtype) == "bool" else T.reinterpret(f"uint{8 * size}", x)


def from_bits(bits, dtype: str):
    """The value in registers of an element's bits; floats as float32."""
    if dtype == "bool":
        return T.cast(bits, "bool")
    if dtype == "bfloat16":
        return T.reinterpret("float32", T.cast(bits, "uint32") << T.uint32(16))
    if dtype == "float16":
        return T.cast(T.reinterpret("float16", bits), "float32")
    return T.reinterpret(dtype, bits)


def staged_lanes(tile: Tile, view, row, first) -> list:
    """The lanes of a vector of the results that begins at element `first` of row `row` of the tile."""
    box, dtype = tile.box, tile.source.dtype
    begin = row * box.pitch(tile.size) + SLACK
    if box.block is None or box.is_aligned and box.block % VECTOR == 0:  # the lanes lie together
        at = scalar("begin", begin + box.in_row(first))
        return [from_bits(view[at + i], dtype) for i in range(VECTOR)]
    begin, first = scalar("begin", begin), scalar("of_row", first)
    return [from_bits(view[begin + box.in_row(first + i)], dtype) for i in range(VECTOR)]
