"""Aligned runs of a source's neighbours that hold what the lanes of a vector read, each lane anywhere in them.

So even and odd elements, neighbours that change places, an element of a table for each pair, and vectors that begin
inside of aligned ones are loaded in a few instructions, and lanes are picked in registers.
"""

from dataclasses import dataclass
from typing import Any

from tir_kernels.fusion.group.symbols import Symbols
from tir_kernels.fusion.steps import VECTOR

WIDTHS = (2, 4, VECTOR)  # elements of a run, which begins at a multiple of them
MOST_ELEMENTS = 2 * VECTOR  # of all runs: the more of them no lane reads, the less loading whole runs gains


@dataclass(frozen=True)
class Runs:
    """Runs of `width` elements.

    Attributes
    ----------
    width : int
        Elements of each run, one of `WIDTHS`.
    firsts : tuple
        The position of each run's first element, a multiple of `width`; an expression that no lane is in.
    places : tuple of (int, int)
        For each lane, the number of its run and which of the run's elements it reads.
    """

    width: int
    firsts: tuple[Any, ...]
    places: tuple[tuple[int, int], ...]


def runs_of(symbols: Symbols, position, elements: int, any_order: bool = True) -> Runs | None:
    """The fewest runs for lanes at `position` in a source of so many elements, or None if single loads are as few.

    Without `any_order` it is one run of neighbours, or none.
    """
    first = symbols.first_of_neighbours(position)
    if first is not None and symbols.is_multiple(first, VECTOR):
        return Runs(VECTOR, (first,), tuple((0, lane) for lane in range(VECTOR)))
    if not any_order:
        return None
    positions = [symbols.at(position, lane) for lane in range(VECTOR)]
    found, fewest = None, len(set(map(str, positions)))
    for width in WIDTHS:
        # Only then does a run end inside of the source wherever one of its elements does.
        runs = _runs(symbols, positions, width) if elements % width == 0 else None
        if runs is not None and len(runs.firsts) < fewest and width * len(runs.firsts) <= MOST_ELEMENTS:
            found, fewest = runs, len(runs.firsts)
    return found


def _runs(symbols: Symbols, positions: list, width: int) -> Runs | None:
    """The runs of `width` elements that hold these positions, or None where alignment does not tell their places."""
    firsts: dict[str, Any] = {}
    places = []
    for position in positions:
        place = symbols.remainder(position, width)
        if place is None:
            return None
        first = symbols.analyzer.simplify(position - place)
        firsts.setdefault(str(first), first)
        places.append((list(firsts).index(str(first)), place))
    return Runs(width, tuple(firsts.values()), tuple(places))
