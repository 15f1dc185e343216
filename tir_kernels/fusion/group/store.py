"""The two ends of a thread's work on a group: which place it has, and writing what it found there."""

import math
from collections.abc import Sequence

from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.group.emit import Lanes, assign, register_dtype, where
from tir_kernels.fusion.group.indices import flatten
from tir_kernels.fusion.group.problem import GroupProblem
from tir_kernels.fusion.group.symbols import Symbols
from tir_kernels.fusion.problem import DTYPES
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.steps import VECTOR, store_vector

SIZES = {"bool": 1, **{f"{kind}{8 * size}": size for kind in ("int", "uint") for size in (1, 2, 4, 8)}, "float64": 8}


def store_lanes(
    problem: GroupProblem,
    result: int,
    lanes: Lanes,
    indices: Sequence,
    outputs: Sequence,
    symbols: Symbols,
    inside: list,
    limit=None,
) -> None:
    """Write a vector of a result at `indices` to its buffers among all `outputs`, where the conditions `inside` hold.

    With a `limit`, the number of the vector, its elements are those of the result in order, and the last vector is
    longer than the result.
    """
    shape, dtype = problem.value(result).shape, problem.value(result).dtype
    position = symbols.analyzer.simplify(flatten(symbols.simplified(indices), shape))
    buffers = [out for number, out in zip(problem.results, outputs) if number == result]
    first = symbols.first_of_neighbours(position)
    values = as_stored(lanes, dtype)
    if first is not None and symbols.is_multiple(first, VECTOR):
        at = scalar("at", symbols.in_registers(first))
        for out in buffers:
            where(inside, lambda out=out: store_whole(out, at, values, dtype))
        return
    for out in buffers:
        for i in range(VECTOR):
            conditions = inside if limit is None else [limit * VECTOR + i < math.prod(shape)]
            put = T.cast(values[i], dtype) if str(values[i].ty.dtype) != dtype else values[i]
            where(conditions, lambda out=out, i=i, put=put: assign(out, symbols.in_registers(position, i), put))


def store_one(
    problem: GroupProblem, result: int, value, indices: Sequence, outputs: Sequence, symbols: Symbols
) -> None:
    """Write one element of a result."""
    shape, dtype = problem.value(result).shape, problem.value(result).dtype
    at = scalar("at", symbols.in_registers(symbols.analyzer.simplify(flatten(symbols.simplified(indices), shape))))
    put = T.cast(value, dtype) if str(value.ty.dtype) != dtype else value
    for number, out in zip(problem.results, outputs):
        if number == result:
            assign(out, at, put)


def decode(symbols: Symbols, rows, number) -> None:
    """Give the rows' variables their values for row `number`."""
    extents = [n for _, n in rows]
    for axis, (var, n) in enumerate(rows):
        inner = math.prod(extents[axis + 1 :])
        index = T.truncdiv(number, inner) if inner > 1 else number
        wraps = n > 1 and any(extent > 1 for extent in extents[:axis])
        symbols.registers[var] = scalar("index", T.truncmod(index, n) if wraps else index if n > 1 else T.int32(0))


def as_stored(lanes, dtype: str):
    """VECTOR values to store; floats in one buffer."""
    if dtype not in DTYPES:
        return [lanes[i % len(lanes)] for i in range(VECTOR)]
    (buffer,) = local_buffers("stored", 1, VECTOR, register_dtype(dtype))
    for i in range(VECTOR):
        assign(buffer, i, lanes[i % len(lanes)])
    return buffer


def store_whole(out, at, values, dtype: str) -> None:
    """Write VECTOR values from position `at` on, a multiple of VECTOR."""
    if dtype in DTYPES:
        store_vector(dtype)(lambda i: out.ptr_to([at + i]), values)
        return
    size = SIZES[dtype]
    words = local_buffers("packed", 1, 2 * size, "uint32")[0]
    for i, word in enumerate(_words([values[i] for i in range(VECTOR)], dtype, size)):
        assign(words, i, word)
    if size == 1:
        _store_two(words, out.ptr_to([at]))
    else:
        for i in range(0, 2 * size, 4):
            _store_four(words, i, out.ptr_to([at + i * 4 // size]))


@T.inline
def _store_two(words, pointer):
    T.ptx["st.global.v2.b32"](pointer, words[0], words[1])


@T.inline
def _store_four(words, first, pointer):
    T.ptx["st.global.v4.b32"](pointer, words[first], words[first + 1], words[first + 2], words[first + 3])


def _words(values: list, dtype: str, size: int) -> list:
    """32-bit words of integers, booleans or float64."""
    # Integers are cast, which keeps their bits: TVM may compute those that fit in 32 bits, and reinterprets no others.
    convert = T.reinterpret if dtype.startswith("float") else lambda kind, x: T.cast(x, kind)
    if size < 4:
        each = 4 // size
        bits = [T.cast(x if dtype == "bool" else convert(f"uint{8 * size}", x), "uint32") for x in values]
        found = []
        for first in range(0, VECTOR, each):
            word = bits[first]
            for i in range(1, each):
                word = word | bits[first + i] << T.uint32(8 * size * i)
            found.append(word)
        return found
    bits = [convert(f"uint{8 * size}", x) for x in values]
    if size == 4:
        return bits
    return [T.cast(x >> T.uint64(32 * half) if half else x, "uint32") for x in bits for half in (0, 1)]
