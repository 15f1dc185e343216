"""The work of a domain that is cut into boxes: a CTA fills tiles of shared memory, then computes the box's vectors."""

import math

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.group.boxes.box import Box
from tir_kernels.fusion.group.boxes.reads import expression_of
from tir_kernels.fusion.group.boxes.staging import Tile, fill, staged_lanes
from tir_kernels.fusion.group.domains import Domain
from tir_kernels.fusion.group.emit import Emitter, all_of, assign, where
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.store import as_stored, store_whole
from tir_kernels.fusion.group.symbols import Symbols
from tir_kernels.fusion.steps import VECTOR


@T.inline
def _repeat(count, body):
    for i in T.serial(count):
        body(i)


@T.inline
def _wait_for_all():
    T.cuda.cta_sync()


class BoxPart:
    """The CTAs of a domain's boxes, and the code of one of their threads."""

    def __init__(self, problem: GroupProblem, domain: Domain, box: Box, threads: int):
        self.problem, self.domain, self.box, self.threads = problem, domain, box, threads
        self.ctas, self.shared_bytes = box.ctas, box.shared_bytes
        pairs = zip(box.reads, box.sizes)
        self.tiles = [Tile(box, read, problem.sources[read.source], size, threads) for read, size in pairs]
        # Vectors that cover a row; where rows begin anywhere, some lanes of the first and the last are outside.
        self.row_vectors = box.run // VECTOR if box.is_aligned else -(-(box.run + VECTOR - 1) // VECTOR)
        self.vectors = box.rows * self.row_vectors

    def emit(self, sources, outputs, cta, thread, pool, slot) -> None:
        """The code of a thread of the part's CTA number `cta`; `pool` is the CTA's shared memory, in bytes."""
        box = self.box
        boxes, inside = self._decode(cta)
        corner = [index * box.extents[axis] if index is not None else T.int32(0) for axis, index in enumerate(boxes)]
        views = []
        for offset, size in zip(box.offsets, box.sizes):
            elements = box.tile_bytes(size) // size
            view = T.decl_buffer(
                (elements,), f"uint{8 * size}", data=pool.data, elem_offset=offset // size, scope="shared.dyn"
            )
            views.append(view)
        fill(self.tiles, sources, views, corner, thread)
        _wait_for_all()
        steps = -(-self.vectors // self.threads)

        def vector(step):
            number = thread + step * self.threads if steps > 1 else thread
            self._vector(sources, outputs, views, boxes, inside, scalar("vector", number))

        if steps > 1:
            _repeat(steps, vector)
        else:
            vector(0)

    def _decode(self, cta) -> tuple[list, list]:
        """(the box's number along each axis, None for the only one; conditions that the box exists)."""
        box, rest = self.box, cta
        found: list = [None] * len(box.shape)
        order = [(axis, count) for axis, count in box.order if count > 1]
        scales: dict[int, int] = {}
        for i, (axis, count) in enumerate(order):
            index = T.truncmod(rest, count) if i + 1 < len(order) else rest
            rest = T.truncdiv(rest, count)
            found[axis] = index if found[axis] is None else found[axis] + index * scales[axis]
            scales[axis] = scales.get(axis, 1) * count
        split = box.out_axes[0]
        inside = []
        for axis, index in enumerate(found):
            if index is not None:
                found[axis] = scalar("box", index)
        if scales.get(split, 1) > box.counts[split]:
            number = found[split]
            inside.append(number < box.counts[split])
            found[split] = scalar("box", T.min(number, box.counts[split] - 1))
        return found, inside

    def _vector(self, sources, outputs, views, boxes, inside: list, number) -> None:
        """One vector of a row of the tile: its lanes, stored where they lie inside of the results."""
        box, symbols, inside = self.box, Symbols(), list(inside)
        if self.vectors % self.threads:
            inside.append(number < self.vectors)
            number = scalar("read", T.min(number, self.vectors - 1))
        row = scalar("row", T.truncdiv(number, self.row_vectors))
        within = T.truncmod(number, self.row_vectors)
        indices: list = [tirx.IntImm("int32", 0)] * len(box.shape)
        for axis, n in enumerate(box.shape):
            if n > 1 and axis not in box.out_axes:
                indices[axis] = symbols.new(f"i{axis}", n)
                symbols.registers[indices[axis]] = self._index(axis, boxes[axis], row, inside)
        # Elements from the run's beginning on, along all boxes, and those of this box.
        split = box.out_axes[0]
        whole = box.shape[split] * box.inner
        begin = T.int32(0) if boxes[split] is None else boxes[split] * box.run
        end = T.min(begin + box.run, whole) if whole % box.run else begin + box.run
        if box.is_aligned:
            column = symbols.new("column", whole // VECTOR)
            at = scalar("column", T.truncdiv(begin, VECTOR) + within)
            if whole % box.run:
                inside.append(at < whole // VECTOR)
                at = scalar("column", T.min(at, whole // VECTOR - 1))
            symbols.registers[column] = at
            first, element, lanes_inside = at * VECTOR, column * VECTOR + symbols.lane, None
        else:
            base = scalar("base", symbols.in_registers(self._flat(indices)) + begin)
            first = scalar("first", begin + within * VECTOR - (base & VECTOR - 1))
            var = symbols.new("first", whole + box.run + VECTOR, 1 - VECTOR)
            symbols.registers[var] = first
            element = tirx.Min(tirx.Max(var + symbols.lane, tirx.IntImm("int32", 0)), tirx.IntImm("int32", whole - 1))
            lanes_inside = lambda i: [first + i >= begin, first + i < end]
        for position, axis in enumerate(box.out_axes):
            later = math.prod(box.extents[a] for a in box.out_axes[position + 1 :])
            index = tirx.floordiv(element, later) if later > 1 else element
            indices[axis] = tirx.floormod(index, box.extents[axis]) if position else index
        indices = symbols.simplified(indices)
        emitter = Emitter(self.problem, sources, symbols)
        emitter.staged = self._lookup(emitter, indices, views, row, first - begin)
        flat = scalar("flat", symbols.in_registers(self._flat(self._at_run(indices))) + first)
        found = [(result, emitter.lanes(value, indices)) for result, value in zip(self.domain.results, box.values)]
        for result, lanes in found:
            self._store(outputs, result, lanes, flat, inside, lanes_inside)

    def _index(self, axis: int, number, row, inside: list):
        """The index along an axis that is none of the run's, the last one where it lies outside."""
        box, index = self.box, T.int32(0) if number is None else number
        if axis in box.in_axes:
            later = math.prod(box.extents[a] for a in box.in_axes[box.in_axes.index(axis) + 1 :])
            place = T.truncdiv(row, later) if later > 1 else row
            if axis != box.in_axes[0]:
                place = T.truncmod(place, box.extents[axis])
            index = place if number is None else number * box.extents[axis] + place
            if box.shape[axis] % box.extents[axis]:
                index = scalar("index", index)
                inside.append(index < box.shape[axis])
                index = T.min(index, box.shape[axis] - 1)
        return scalar("index", index)

    def _at_run(self, indices: list) -> list:
        """The indices where the run begins, along all boxes."""
        zero = tirx.IntImm("int32", 0)
        return [zero if axis in self.box.out_axes else index for axis, index in enumerate(indices)]

    def _flat(self, indices: list):
        """The position in the results."""
        pairs = zip(indices, self.box.out_strides, self.box.shape)
        found = tirx.IntImm("int32", 0)
        for index, stride, n in pairs:
            found = found + index * stride if n > 1 else found
        return found

    def _lookup(self, emitter: Emitter, indices: list, views, row, element):
        """The emitter's `staged`: lanes of the tile of a read at these positions.

        Where a tile's lanes begin is known to the emitter, which forgets it after the branch that computed it.
        """

        def staged(number: int, position):
            for i, (tile, view) in enumerate(zip(self.tiles, views)):
                wanted = expression_of(tile.read.position, indices)
                if tile.read.source == number and emitter.symbols.is_known(position == wanted):
                    key = "tile", i
                    if key not in emitter.known:
                        emitter.known[key] = staged_lanes(tile, view, row, element)
                    return emitter.known[key]
            return None

        return staged

    def _store(self, outputs, result: int, lanes, flat, inside: list, lanes_inside) -> None:
        """Write a vector of a result, or those of its lanes that lie inside."""
        dtype = self.problem.value(result).dtype
        buffers = [out for number, out in zip(self.problem.results, outputs) if number == result]
        values = as_stored(lanes, dtype)
        for out in buffers:
            if lanes_inside is None:
                where(inside, lambda out=out: store_whole(out, flat, values, dtype))
                continue
            ends = [lanes_inside(0)[0], lanes_inside(VECTOR - 1)[1]]
            is_whole = scalar("is_whole", T.cast(all_of(ends), "int32"))

            def put(out=out, is_whole=is_whole):
                where([is_whole > 0], lambda: store_whole(out, flat, values, dtype))
                where([is_whole < 1], lambda: self._store_lanes(out, flat, values, dtype, lanes_inside))

            where(inside, put)

    @staticmethod
    def _store_lanes(out, flat, values, dtype: str, lanes_inside) -> None:
        for i in range(VECTOR):
            put = T.cast(values[i], dtype) if str(values[i].ty.dtype) != dtype else values[i]
            where(lanes_inside(i), lambda i=i, put=put: assign(out, flat + i, put))
