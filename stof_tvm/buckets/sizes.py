"""The sizes that a range of shapes is compiled at."""

import bisect
import itertools
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from tir_kernels.errors import InputError

MOST = 48  # engines that are made unless sizes are given
GROWTHS = (1.08, 1.1, 1.12, 1.16, 1.2, 1.3, 1.5, 2, 3, 4, 8, 16)  # from a size to the next
FINE, COARSE = 16, 64  # larger sizes are multiples of these, below and from COARSE_FROM on
COARSE_FROM = 1024


def default_sizes(limits: Mapping[Any, tuple[int, int]], most: int = MOST) -> dict[Any, tuple[int, ...]]:
    """Sizes for each symbol with (least, most) of it: from the largest down, each a little less than the next.

    All combinations of them are at most `most`, unless two sizes of each are more.  Where 1 is the least size, it is
    one of them.
    """
    for growth in GROWTHS:
        found = {symbol: _falling(least, largest, growth) for symbol, (least, largest) in limits.items()}
        if math.prod(map(len, found.values())) <= most:
            return found
    return {symbol: tuple(sorted({least, largest})) for symbol, (least, largest) in limits.items()}


def _falling(least: int, largest: int, growth: float) -> tuple[int, ...]:
    sizes = {largest} | ({1} if least == 1 else set())
    size = largest
    smallest = max(least, 2, min(FINE, largest // 4))  # a smaller one saves nothing
    while (size := _next(size, growth)) >= smallest:
        sizes.add(size)
    return tuple(sorted(sizes))


def _next(size: int, growth: float) -> int:
    """The smallest round size that `size` is at most `growth` times, or else the largest round one below it."""
    smaller = math.ceil(size / growth)
    multiple = COARSE if smaller >= COARSE_FROM else FINE
    rounded = -(-smaller // multiple) * multiple
    if rounded >= size:
        rounded = (size - 1) // multiple * multiple
    return rounded if smaller > FINE else min(smaller, size - 1)


def given_sizes(given, limits: Mapping[Any, tuple[int, int]], names: Mapping[Any, Sequence[str]]) -> dict[Any, tuple]:
    """The sizes of a user's `buckets`: a sequence where one size may change, else sequences by a name of each.

    Symbols without sizes get the default ones.  The largest of the range, and 1 where it is the least, are added.
    InputError for names that there are not, and for sizes outside the range.
    """
    if given is None:
        return default_sizes(limits)
    if not isinstance(given, Mapping):
        if len(limits) != 1:
            told = ", ".join(repr(own[0]) for own in names.values())
            raise InputError(f"buckets={reprlib.repr(given)}: {len(limits)} sizes may change, give a dict of {told}")
        given = {next(iter(names.values()))[0]: given}
    by_name = {name: symbol for symbol, own in names.items() for name in own}
    chosen: dict[Any, tuple] = {}
    for name, sizes in given.items():
        if name not in by_name:
            raise InputError(f"buckets has {name!r}; the sizes that may change are {', '.join(map(repr, by_name))}")
        if by_name[name] in chosen:
            told = " and ".join(repr(other) for other in given if by_name.get(other) == by_name[name])
            raise InputError(f"{told} are one size: give buckets of it once")
        least, most = limits[by_name[name]]
        if isinstance(sizes, str) or not isinstance(sizes, Sequence) or not sizes:
            raise InputError(f"buckets[{name!r}] must be a sequence of sizes, got {reprlib.repr(sizes)}")
        for size in sizes:
            if type(size) is not int or not least <= size <= most:
                raise InputError(f"buckets[{name!r}] has {size!r}; {name} is {least} to {most}")
        chosen[by_name[name]] = tuple(sorted({*sizes, most, *([1] if least == 1 else [])}))
    left = {symbol: limit for symbol, limit in limits.items() if symbol not in chosen}
    most_left = max(1, MOST // math.prod(map(len, chosen.values())))
    return {**default_sizes(left, most_left), **chosen} if left else chosen


def smallest_fit(sizes: Sequence[int], number: int) -> int:
    """The smallest of ascending sizes that is not below a number, which the largest is not."""
    return sizes[bisect.bisect_left(sizes, number)]


def combinations(sizes: Mapping[Any, Sequence[int]]) -> list[dict[Any, int]]:
    """All combinations of a size for each symbol, the largest first."""
    return [dict(zip(sizes, combination)) for combination in itertools.product(*(own[::-1] for own in sizes.values()))]
