"""Bounds of values in blocks: from bounds of an operator's arguments to bounds of its result.

The operators themselves compute the bounds, in their own dtypes, so that bounds include all roundings.  Where no rule
is known, there are no bounds.  A rule may be wider than needed, and is never wrong.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
EXACT = 1 << 53  # float64 has all integers up to this one
LARGEST_TABLE = 1 << 26  # elements, of each of which a sum of four bytes is held


@dataclass(frozen=True, eq=False)
class Bounds:
    """Every element of a block is from `low` to `high`: tensors that broadcast to (block rows, block columns).

    Of a number in the code, both are that number.
    """

    low: Any
    high: Any

    @classmethod
    def of_groups(cls, values: torch.Tensor) -> "Bounds | None":
        """Bounds of each row of values (n, size), as (n, 1); None where one is not finite."""
        if values.dtype == torch.bool:
            return cls(values.all(1, keepdim=True), values.any(1, keepdim=True))
        return _finite(values.amin(1, keepdim=True), values.amax(1, keepdim=True))

    @classmethod
    def of_windows(cls, values: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> "Bounds | None":
        """Bounds of values[first … last] (n,), for index tensors of one shape; `values` are no booleans."""
        low, high = (torch.empty(first.shape, dtype=values.dtype, device=values.device) for _ in range(2))
        sizes = last - first + 1
        for size in sizes.unique().tolist():
            at = sizes == size
            least, most = _extremes(values, size)
            low[at], high[at] = least[first[at]], most[first[at]]
        return _finite(low, high)

    @property
    def T(self) -> "Bounds":
        return Bounds(self.low.T, self.high.T)

    @property
    def is_constant(self) -> bool:
        """Whether it is one number everywhere."""
        return not isinstance(self.low, torch.Tensor) or self.low.numel() == 1 and bool(self.low == self.high)


def constant_bounds(value) -> Bounds | None:
    """Bounds of a number, of None, or of a tensor of one element; None for other tensors."""
    if not isinstance(value, torch.Tensor):
        return Bounds(value, value)
    return _finite(value, value) if value.numel() == 1 else None


def result_bounds(function, dtype: torch.dtype, args: list, kwargs: dict) -> Bounds | None:
    """Bounds of an operator's result, of `dtype`, by those of its arguments; an argument without bounds is None."""
    packet = function.overloadpacket
    if packet in LOGICAL:
        return LOGICAL[packet](*map(_truth, args)) if dtype == torch.bool else None
    if packet not in RULES or any(x is None for x in args) or "alpha" in kwargs:
        return None
    return RULES[packet](function, args, kwargs)


def table_bounds(table: torch.Tensor, indices: list[Bounds], known: dict) -> Bounds | None:
    """Bounds of table[i, j, …], a table of booleans; at most two of the indices may be no constants.

    `known` keeps the sums of the part that was read last for other blocks, whose constants may be others.
    """
    part: tuple = ()  # (axis, place) of the indices that are constants here
    for dim in reversed(range(table.dim())):
        if indices[dim].is_constant and table.dim() > 2:
            part = *part, (dim, int(indices[dim].low))
            table, indices = table.select(*part[-1]), indices[:dim] + indices[dim + 1 :]
    if table.dim() == 1:
        table, indices = table[None], [Bounds(*2 * [torch.zeros((1, 1), dtype=torch.int64)]), *indices]
    inside = all(bool((x.low >= 0).all() and (x.high < n).all()) for x, n in zip(indices, table.shape))
    if table.dim() != 2 or table.dtype != torch.bool or table.numel() > LARGEST_TABLE or not inside:
        return None
    rows, columns = indices
    if part not in known:
        known.clear()  # one part at a time: there may be one for each block row
        known[part] = _sums(table)
    before = known[part]
    corner = lambda i, j: before[i, j]
    count = corner(rows.high + 1, columns.high + 1) - corner(rows.low, columns.high + 1)
    count = count - corner(rows.high + 1, columns.low) + corner(rows.low, columns.low)
    return Bounds(count == (rows.high + 1 - rows.low) * (columns.high + 1 - columns.low), count > 0)


def _sums(table: torch.Tensor) -> torch.Tensor:
    """int32 (rows + 1, columns + 1): how many of the first i rows and j columns are True, of up to `LARGEST_TABLE`."""
    rows, columns = table.shape
    sums = torch.zeros((rows + 1, columns + 1), dtype=torch.int32)
    sums[1:, 1:] = table
    return sums.cumsum_(0).cumsum_(1)


def _finite(low: torch.Tensor, high: torch.Tensor) -> Bounds | None:
    """Bounds, or None where one is infinite or NaN: inside infinite bounds, inf - inf and 0 * inf are NaN."""
    return Bounds(low, high) if bool((low.isfinite() & high.isfinite()).all()) and not low.is_complex() else None


def _extremes(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each `size` values in a row, by doubling."""
    low = high = values
    span = 1
    while 2 * span <= size:
        low, high = torch.minimum(low[:-span], low[span:]), torch.maximum(high[:-span], high[span:])
        span *= 2
    count, rest = len(values) - size + 1, size - span
    pair = lambda x: (x[:count], x[rest : rest + count])
    return torch.minimum(*pair(low)), torch.maximum(*pair(high))


# -- rules: from (operator, bounds of its arguments, keyword arguments) to bounds --------------------------------------


def _monotone(signs: str) -> Callable:
    """The rule of an operator that rises ("+") or falls ("-") with each argument."""

    def rule(function, args, kwargs):
        low = [x.low if sign == "+" else x.high for x, sign in zip(args, signs)]
        high = [x.high if sign == "+" else x.low for x, sign in zip(args, signs)]
        return _ends(function, low, high, kwargs)

    return rule


def _ends(function, low: list, high: list, kwargs: dict) -> Bounds | None:
    least, most = (_exactly(function, arguments, kwargs) for arguments in (low, high))
    return None if least is None or most is None else _finite(least, most)


def _exactly(function, arguments: list, kwargs: dict) -> torch.Tensor | None:
    """The operator's result; None where integers overflow."""
    result = function(*arguments, **kwargs)
    if result.dtype == torch.bool or result.is_floating_point():
        return result
    real = function(*(x.double() if isinstance(x, torch.Tensor) else x for x in arguments), **kwargs)
    return result if bool(((result == real) & (real.abs() < EXACT)).all()) else None


def _divided(function, args, kwargs):
    """The rule of quotients, rounded or not: they rise with the dividend if the divisor is positive."""
    return _monotone("++")(function, args, kwargs) if _is_positive(args[1]) else None


def _multiplied(function, args, kwargs):
    (a, b) = args
    corners = [_exactly(function, [x, y], kwargs) for x, y in itertools.product((a.low, a.high), (b.low, b.high))]
    known = [x for x in corners if x is not None]
    if len(known) < len(corners):
        return None
    return _finite(functools.reduce(torch.minimum, known), functools.reduce(torch.maximum, known))


def _absolute(function, args, kwargs):
    (x,) = args
    a, b = (_exactly(function, [end], kwargs) for end in (x.low, x.high))
    if a is None or b is None:
        return None
    holds_zero = (x.low <= 0) & (x.high >= 0)
    return Bounds(torch.where(holds_zero, torch.zeros_like(a), torch.minimum(a, b)), torch.maximum(a, b))


def _power(function, args, kwargs):
    x, exponent = args
    if not isinstance(exponent.low, int) or exponent.low < 1 or not isinstance(x.low, torch.Tensor):
        return None
    if x.low.is_floating_point() and exponent.low > 3:  # a library's function, which need not be monotone
        return None
    if exponent.low % 2 == 0:
        x = _absolute(aten.abs.default, [x], {})
    return None if x is None else _ends(function, [x.low, exponent.low], [x.high, exponent.low], kwargs)


def _remainder(function, args, kwargs):
    x, divisor = args
    if not _is_positive(divisor) or not isinstance(x.low, torch.Tensor) or x.low.dtype != torch.int64:
        return None
    n = divisor.low.item() if isinstance(divisor.low, torch.Tensor) else divisor.low
    if not isinstance(n, int):
        return None
    same = torch.div(x.low, n, rounding_mode="floor") == torch.div(x.high, n, rounding_mode="floor")
    low, high = function(x.low, divisor.low), function(x.high, divisor.low)
    if low.is_floating_point() or low.dtype == torch.bool:
        return None
    return Bounds(torch.where(same, low, 0), torch.where(same, high, n - 1))


def _equal(function, args, kwargs):
    a, b = args
    certain = (a.low == a.high) & (b.low == b.high) & (a.low == b.low)
    return Bounds(torch.as_tensor(certain), torch.as_tensor((a.low <= b.high) & (b.low <= a.high)))


def _unequal(function, args, kwargs):
    return _not(_equal(function, args, kwargs))


def _chosen(function, args, kwargs):
    condition, (a, b) = _truth(args[0]), args[1:]
    pick = lambda which, x, y: function(torch.tensor(which), x, y)  # in the dtype of the result
    lows = [pick(which, a.low, b.low) for which in (True, False)]
    highs = [pick(which, a.high, b.high) for which in (True, False)]
    low = torch.where(condition.low, lows[0], torch.where(condition.high, torch.minimum(*lows), lows[1]))
    high = torch.where(condition.low, highs[0], torch.where(condition.high, torch.maximum(*highs), highs[1]))
    return _finite(low, high)


def _converted(function, args, kwargs):
    (x,) = args
    dtype = kwargs["dtype"]
    if dtype == torch.bool:
        return _truth(x)
    if x.low.is_floating_point() and not dtype.is_floating_point:
        return None
    low, high = x.low.to(dtype), x.high.to(dtype)
    is_exact = dtype.is_floating_point or bool(((low == x.low) & (high == x.high)).all())
    return _finite(low, high) if is_exact else None


def _is_positive(x: Bounds) -> bool:
    return x.is_constant and bool(x.low > 0)


RULES = {
    aten.add: _monotone("++"), aten.sub: _monotone("+-"), aten.neg: _monotone("-"),
    aten.minimum: _monotone("++"), aten.maximum: _monotone("++"), aten.clamp: _monotone("+++"),
    aten.clamp_min: _monotone("++"), aten.clamp_max: _monotone("++"),
    aten.lt: _monotone("-+"), aten.le: _monotone("-+"), aten.gt: _monotone("+-"), aten.ge: _monotone("+-"),
    aten.floor: _monotone("+"), aten.ceil: _monotone("+"), aten.sqrt: _monotone("+"),
    aten.floor_divide: _divided, aten.div: _divided, aten.mul: _multiplied, aten.abs: _absolute, aten.pow: _power,
    aten.remainder: _remainder, aten.eq: _equal, aten.ne: _unequal, aten.where: _chosen, aten._to_copy: _converted,
}  # fmt: skip


# -- logic: whether all elements are True (low), and whether any may be (high) -----------------------------------------


def _truth(x: Bounds | None) -> Bounds:
    """Bounds of whether a value is not zero."""
    if x is None:
        return Bounds(torch.tensor(False), torch.tensor(True))
    low, high = torch.as_tensor(x.low), torch.as_tensor(x.high)
    if low.dtype == torch.bool:
        return Bounds(low, high)
    return Bounds((low > 0) | (high < 0), (low != 0) | (high != 0))


def _not(x: Bounds) -> Bounds:
    return Bounds(~x.high, ~x.low)


def _and(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.low & b.low, a.high & b.high)


def _or(a: Bounds, b: Bounds) -> Bounds:
    return Bounds(a.low | b.low, a.high | b.high)


def _xor(a: Bounds, b: Bounds) -> Bounds:
    return Bounds((a.low & ~b.high) | (b.low & ~a.high), (a.high & ~b.low) | (b.high & ~a.low))


LOGICAL: dict[Any, Callable] = {
    aten.logical_and: _and, aten.bitwise_and: _and, aten.logical_or: _or, aten.bitwise_or: _or,
    aten.logical_xor: _xor, aten.bitwise_xor: _xor, aten.logical_not: _not, aten.bitwise_not: _not,
}  # fmt: skip
