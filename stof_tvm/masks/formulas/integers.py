"""Formulas of 64-bit integers: NumPy computes their elements on all cores, a chunk at a time in each thread.

PyTorch divides one element after the other.  NumPy's division by a constant is a multiplication of vectors, and the
remainder of a sum of vectors needs none, only their remainders.  Only what both compute alike bit by bit is taken,
overflows included: a comparison of int64 values that operators of int64 give.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from stof_tvm.masks.formulas.values import COLUMN, OFFSET, ROW, Mixed, Vector
from tir_kernels.masks.bitmap import TILE, pack_bitmap

AT_ONCE = 1 << 18  # elements that a thread computes at a time: few arrays of 2 MiB, along whose rows loops are long
LARGEST_DIVISOR = 1 << 15  # of residues, two of which fit in 16 bits together
INT64 = np.iinfo(np.int64)
aten = torch.ops.aten


def remainder(x: np.ndarray, divisor: np.int64, out: np.ndarray) -> np.ndarray:
    """x % divisor with the sign of the divisor, int64; the divisor is neither 0 nor -1, and `out` is not x.

    The product on the way may overflow: the result is in int64, and right modulo 2^64.
    """
    np.floor_divide(x, divisor, out=out)
    np.multiply(out, divisor, out=out)
    return np.subtract(x, out, out=out)


ARITHMETIC: dict[Any, Callable] = {
    aten.add: np.add, aten.sub: np.subtract, aten.rsub: lambda x, y, out: np.subtract(y, x, out=out),
    aten.mul: np.multiply, aten.neg: np.negative, aten.abs: np.absolute,
    aten.minimum: np.minimum, aten.maximum: np.maximum,
    aten.bitwise_and: np.bitwise_and, aten.bitwise_or: np.bitwise_or, aten.bitwise_xor: np.bitwise_xor,
    aten.bitwise_not: np.invert, aten.floor_divide: np.floor_divide, aten.remainder: remainder,
    aten.__lshift__: np.left_shift, aten.bitwise_left_shift: np.left_shift,
    aten.__rshift__: np.right_shift, aten.bitwise_right_shift: np.right_shift,
}  # fmt: skip
COMPARISONS: dict[Any, Callable] = {
    aten.lt: np.less, aten.le: np.less_equal, aten.gt: np.greater, aten.ge: np.greater_equal,
    aten.eq: np.equal, aten.ne: np.not_equal,
}  # fmt: skip
# Constants that the second argument may be.  Dividing by 0 is an error of PyTorch's, and by -1 it overflows.
SECOND: dict[Any, Callable[[int], bool]] = {
    **dict.fromkeys((aten.floor_divide, aten.remainder), lambda n: n not in (0, -1)),
    **dict.fromkeys((aten.__lshift__, aten.__rshift__), lambda n: 0 <= n < 63),
    **dict.fromkeys((aten.bitwise_left_shift, aten.bitwise_right_shift), lambda n: 0 <= n < 63),
}


class NoIntegers(Exception):
    """Something else than integers, or an operator that NumPy is not known to compute alike."""


class Integers:
    """A comparison of integers that depend on both indices, for blocks of elements.

    Attributes
    ----------
    leaves : list
        Constants as int64 scalars of NumPy, and Vectors as (axis, int64 array).
    steps : list
        (function, numbers of its arguments, numbers of those results that are not needed after it).  Leaves are
        numbered first, then the results of steps; the last step is the comparison.
    """

    def __init__(self, value: Mixed, zero: int):
        """`value` is on the CPU; `zero` is the place of the offset 0 in a Vector.  NoIntegers for another value."""
        self.zero, self.leaves, self.steps = zero, [], []
        found: list[tuple[Callable, tuple]] = []  # (function, arguments) of each step, after those of its arguments
        number: dict[int, int] = {}  # by id: of a leaf, or -1 - that of a step

        def read(x, table: dict):
            if id(x) in number:
                return
            if isinstance(x, Mixed):
                _check(x, table)
                function, args = residues(x) or ((ARITHMETIC | COMPARISONS)[x.function.overloadpacket], x.args)
                for argument in args:
                    read(argument, ARITHMETIC)
                number[id(x)] = -1 - len(found)
                found.append((function, args))
            else:
                number[id(x)] = len(self.leaves)
                self.leaves.append(x if isinstance(x, tuple) else _leaf(x))

        read(value, COMPARISONS)
        place = lambda x: n if (n := number[id(x)]) >= 0 else len(self.leaves) - 1 - n
        last = {place(argument): step for step, (_, args) in enumerate(found) for argument in args}
        for step, (function, args) in enumerate(found):
            places = tuple(map(place, args))
            self.steps.append((function, places, {n for n in places if n >= len(self.leaves) and last[n] == step}))

    @staticmethod
    def of(value: Mixed, zero: int) -> "Integers | None":
        """None where the value is no comparison of integers."""
        try:
            return Integers(value, zero)
        except NoIntegers:
            return None

    def bits(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        """uint64 (n, tiles): the bitmaps of the blocks of rows i[n], columns j[n], int64 (n, height), (n, width)."""
        elements = i.shape[1] * j.shape[1]
        bits = np.empty((len(i), elements // TILE**2), np.uint64)
        step = max(1, AT_ONCE // elements)
        starts = range(0, len(i), step)
        to_do = iter(starts)  # of all threads

        def fill():
            free: list[np.ndarray] = []  # arrays of this thread, whose elements are not needed any more
            for start in to_do:
                some = slice(start, start + step)
                bits[some] = self._packed(i[some], j[some], free)

        threads = min(torch.get_num_threads(), len(starts))
        if threads < 2:
            fill()
            return bits
        with ThreadPoolExecutor(threads) as pool:
            for thread in [pool.submit(fill) for _ in range(threads)]:
                thread.result()
        return bits

    def _packed(self, i: np.ndarray, j: np.ndarray, free: list) -> np.ndarray:
        n = len(i)
        if n > 1 and (i == i[0]).all():
            # Blocks beside each other are one wide block, along which NumPy's loops are long; its tiles are theirs.
            i, j = i[:1], j.reshape(1, -1)
        return pack_bitmap(self._kept(i, j, free)).reshape(n, -1)

    def _kept(self, i: np.ndarray, j: np.ndarray, free: list) -> np.ndarray:
        """Boolean (n, height, width)."""
        places = {ROW: i[:, :, None], COLUMN: j[:, None, :]}
        shape = len(i), i.shape[1], j.shape[1]
        values: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, tuple):
                axis, array = leaf
                if axis not in places:
                    places[OFFSET] = places[COLUMN] - places[ROW] + self.zero
                leaf = array[places[axis]]
            values.append(leaf)
        for function, args, done in self.steps:
            if function in COMPARISONS.values():
                out = np.empty(shape, np.bool_)
            elif not free or (out := free.pop()).shape != shape:
                out = np.empty(shape, np.int64)
            values.append(function(*(values[n] for n in args), out=out))
            free += [values[n] for n in done]
        return values[-1]


def residues(x: Mixed) -> tuple[Callable, tuple] | None:
    """The remainder of a sum that cannot overflow, by the remainders of what depends on each index: no division.

    (function, ((ROW, uint16 array), (COLUMN, uint16 array))), as steps have it; None for another value.
    """
    if x.function.overloadpacket != aten.remainder or not 1 < (divisor := int(_leaf(x.args[1]))) <= LARGEST_DIVISOR:
        return None
    terms = _terms(x.args[0], 1)
    # The magnitudes of all terms together bound each sum on the way.
    if terms is None or sum(max(abs(int(term.min())), abs(int(term.max()))) for _, _, term in terms) > INT64.max:
        return None
    sums: dict[Any, Any] = {ROW: 0, COLUMN: 0, None: 0}
    for sign, axis, term in terms:
        sums[axis] = (sums[axis] + sign * (term % divisor)) % divisor
    if np.ndim(sums[ROW]) == 0 or np.ndim(sums[COLUMN]) == 0:
        return None
    rows, columns = (sums[ROW] + sums[None]) % divisor, sums[COLUMN]
    leaves = (ROW, rows.astype(np.uint16)), (COLUMN, columns.astype(np.uint16))
    return functools.partial(_sum_of_residues, np.uint16(divisor)), leaves


def _sum_of_residues(divisor: np.uint16, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> np.ndarray:
    total = np.add(a, b)
    # Of a total below the divisor, the difference wraps around to a larger number.
    return np.minimum(total, np.subtract(total, divisor), out=out)


def _terms(x, sign: int) -> list[tuple] | None:
    """(sign, ROW, COLUMN or None, int64 array or scalar) of each term of a sum; None where a term is of both."""
    if isinstance(x, Mixed):
        signs = {aten.add: (sign, sign), aten.sub: (sign, -sign), aten.rsub: (-sign, sign)}
        if x.function.overloadpacket not in signs:
            return None
        _check(x, ARITHMETIC)
        a, b = map(_terms, x.args, signs[x.function.overloadpacket])
        return None if a is None or b is None else a + b
    leaf = _leaf(x)
    axis, array = leaf if isinstance(leaf, tuple) else (None, leaf)
    return None if axis == OFFSET else [(sign, axis, array)]


def _check(x: Mixed, table: dict) -> None:
    """NoIntegers unless an operator is one of the table, with no arguments but int64 ones that it may have."""
    packet, dtype = x.function.overloadpacket, torch.bool if table is COMPARISONS else torch.int64
    n_args = sum(argument.default_value is None for argument in x.function._schema.arguments)
    if packet not in table or x.dtype != dtype or x.kwargs or len(x.args) != n_args:
        raise NoIntegers
    if packet in SECOND and not (isinstance(n := _leaf(x.args[1]), np.int64) and SECOND[packet](int(n))):
        raise NoIntegers


def _leaf(x):
    """A Vector as (axis, array), a number as a scalar; NoIntegers unless they are of int64."""
    if isinstance(x, Vector) and x.values.dtype == torch.int64:
        return x.axis, x.values.numpy()
    if isinstance(x, torch.Tensor) and x.dtype == torch.int64 and x.numel() == 1:
        return np.int64(x.item())
    if isinstance(x, int) and not isinstance(x, bool) and INT64.min <= x <= INT64.max:
        return np.int64(x)
    raise NoIntegers
