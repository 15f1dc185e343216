"""Dimensions of a padded tensor: which of its places are the smaller tensor's.

A dimension is a tuple of factors, outermost first, each an int or an expression of the program's symbols.  (b, n), for
a view that joins a batch b with a length n, has at the sizes (B, N) of a bucket the places i * N + j, of which those
with i < b and j < n are the smaller tensor's.  Most dimensions have one factor: the first n of N places.  A dimension
of size 1 has none.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

Size: TypeAlias = Any  # an int, or an expression of SymPy
Dim: TypeAlias = tuple[Size, ...]
MOST_TRIED = 1 << 12  # numbers of symbols


def size_of(size) -> Size:
    """The size of a dimension as torch.export records it, an int or a SymInt."""
    if not isinstance(size, torch.SymInt):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


@dataclass(frozen=True)
class Number:
    """A number that follows from sizes: its expression, and whether it is an int, a float or a bool."""

    expression: Any
    kind: type

    def at(self, numbers: Mapping):
        """It with numbers for the symbols."""
        return self.kind(self.expression.subs(numbers))


def number_of(value):
    """A number as torch.export records it: a Number, or itself if it is the same for all sizes."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return Number(value.node.expr, kinds[type(value)]) if type(value) in kinds else value


def dim_of(size) -> Dim:
    """The dimension of this size whose smaller tensor comes first."""
    return joined([size_of(size)])


def joined(factors: Sequence[Size]) -> Dim:
    """The dimension of some factors: an int joins the factor outside of it, whose padding stays at the end."""
    dim: list[Size] = []
    for factor in factors:
        if isinstance(factor, int) and dim:
            dim[-1] = dim[-1] * factor
        elif not (isinstance(factor, int) and factor == 1):
            dim.append(factor)
    return tuple(dim)


def length(dim: Dim) -> Size:
    """The size of a dimension."""
    product: Size = 1
    for factor in dim:
        product = product * factor
    return product


def is_padded(dim: Dim) -> bool:
    """Whether a dimension has padding in some bucket."""
    return any(not isinstance(factor, int) for factor in dim)


def is_first(dim: Dim) -> bool:
    """Whether all padding comes last."""
    return len(dim) <= 1


def same(a: Dim, b: Dim) -> bool:
    """Whether two dimensions have their padding in the same places."""
    return len(a) == len(b) and all(same_size(x, y) for x, y in zip(a, b))


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are equal, whatever the symbols are."""
    return bool(a == b) or sympy.expand(a - b) == 0


def at(size: Size, numbers: Mapping) -> int:
    """A size with numbers for its symbols."""
    if isinstance(size, int):
        return size
    return int(numbers[size] if size in numbers else size.subs(numbers))  # SymPy takes a hundred times as long


def regrouped(dims: Sequence[Dim], sizes: Sequence[Size]) -> list[tuple[Dim, set[int]]] | None:
    """The dimensions of a view with these sizes, each with the numbers of the dimensions that its factors come from.

    None where a view of the larger tensor is not one of the smaller: where a factor would have to be cut with its
    padding inside.
    """
    queue: list[tuple[Size, set[int]]] = []
    for number, dim in enumerate(dims):
        for factor in dim:
            if queue and isinstance(factor, int) and isinstance(queue[-1][0], int):
                queue[-1] = queue[-1][0] * factor, queue[-1][1] | {number}
            else:
                queue.append((factor, {number}))
    result = []
    for size in sizes:
        taken: list[Size] = []
        origins: set[int] = set()
        rest = size
        while not same_size(rest, 1):
            if not queue:
                return None
            factor, numbers = queue.pop(0)
            origins |= numbers
            if (quotient := _divided(rest, factor)) is not None:
                taken.append(factor)
                rest = quotient
            elif isinstance(remainder := _divided(factor, rest), int) and _is_cut_outside(factor, rest):
                taken.append(rest)
                queue.insert(0, (remainder, numbers))
                rest = 1
            else:
                return None
        result.append((joined(taken), origins))
    return None if queue else result


def _is_cut_outside(factor: Size, outer: Size) -> bool:
    """Whether the padding of `factor` is that of its outer part."""
    return isinstance(factor, int) or not isinstance(outer, int)


def _divided(a: Size, b: Size) -> Size | None:
    """a / b where that is a whole number whatever the symbols are, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if a % b == 0 else None
    if isinstance(a, int):
        return None
    quotient = sympy.cancel(a / b) if not same_size(a, b) else sympy.Integer(1)
    coefficients = sympy.Poly(quotient).coeffs() if not quotient.is_number and quotient.is_polynomial() else [quotient]
    if sympy.fraction(sympy.together(quotient))[1] != 1 or not all(c.is_integer for c in coefficients):
        return None
    return int(quotient) if quotient.is_number else quotient


def grows(size: Size, least: Mapping) -> bool:
    """Whether a size is known to be no less where a symbol is larger; `least` has the symbols' least numbers."""
    if isinstance(size, int) or size.is_number or size.is_Symbol:
        return True
    if isinstance(size, sympy.Add | Max | Min | sympy.Max | sympy.Min):
        return all(grows(x, least) for x in size.args)
    if isinstance(size, sympy.Mul):
        return all(grows(x, least) and x.subs(least) >= 0 for x in size.args)
    if isinstance(size, sympy.Pow):
        base, power = size.args
        return power.is_Integer and power > 0 and grows(base, least) and base.subs(least) >= 0
    if isinstance(size, FloorDiv):
        return size.args[1].is_number and size.args[1] > 0 and grows(size.args[0], least)
    return False


def is_negative(size: Size, least: Mapping, most: Mapping) -> bool | None:
    """Whether a number is below 0 for all numbers of its symbols from `least` to `most`; None if not known for all."""
    symbols = sorted(size.free_symbols, key=str)
    limits = {symbol: ValueRanges(least[symbol], most[symbol]) for symbol in symbols}
    bounds = bound_sympy(size, limits)
    if bounds.lower >= 0 or bounds.upper < 0:
        return bool(bounds.upper < 0)
    ranges = [range(least[symbol], most[symbol] + 1) for symbol in symbols]
    if math.prod(map(len, ranges)) > MOST_TRIED:
        return None
    found = {at(size, dict(zip(symbols, numbers, strict=True))) < 0 for numbers in itertools.product(*ranges)}
    return found.pop() if len(found) == 1 else None
