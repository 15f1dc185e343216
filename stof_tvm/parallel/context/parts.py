"""The parts of a rank's attention: its rows with its own keys, and runs of its rows with the keys that it receives."""

from typing import NamedTuple

import numpy as np

from stof_tvm.parallel.context.exchange import Places
from stof_tvm.parallel.context.gathered import Columns, Gathered
from stof_tvm.parallel.context.lists import BLOCK
from stof_tvm.parallel.context.plan import ContextPlan

GAP = 16 * BLOCK  # rows that are not worth a launch of their own before and after them
MOST = 4  # launches
WHOLE = 0.75  # of the rows: above that the rest makes no difference


class Run(NamedTuple):
    """Rows from `first` to `end` of a rank, and the mask of their received keys."""

    first: int
    end: int
    mask: Gathered


class Parts:
    """The masks of a rank's parts.

    Attributes
    ----------
    own : Gathered or None
        All rows with the rank's own keys; None where nothing of these is kept.
    runs : list of Run
        Rows with received keys.
    """

    def __init__(self, plan: ContextPlan, rank: int, q_heads: int, laid: Places):
        mine = plan.positions(rank)
        self.own = None
        if plan.keeps_own(rank):
            self.own = Gathered(plan.mask, plan.length, mine, [[Columns(mine)]], len(mine))
        self.runs = []
        if laid.count:
            # Key heads have their own columns only where query heads have masks of their own.
            shares = [q_heads // len(row) if len(row) > 1 else 1 for row in laid.columns]
            columns = [[each for each in row for _ in range(share)] for share, row in zip(shares, laid.columns)]
            for first, end in runs(plan.rows_that_receive(rank)):
                part = Gathered(plan.mask, plan.length, mine[first:end], columns, laid.count)
                self.runs.append(Run(first, end, part))


def runs(rows: np.ndarray) -> list[tuple[int, int]]:
    """(first, end) of runs that hold all rows that are True in `rows`, boolean (n,), and begin at multiples of BLOCK.

    There are few of them: short gaps are closed, and where many remain, all are one.
    """
    at = np.flatnonzero(rows)
    if not len(at):
        return []
    starts = np.unique(at // BLOCK) * BLOCK
    breaks = np.flatnonzero(np.diff(starts) > BLOCK + GAP) + 1
    pieces = np.split(starts, breaks)
    if len(pieces) > MOST:
        pieces = [starts]
    found = [(int(piece[0]), min(int(piece[-1]) + BLOCK, len(rows))) for piece in pieces]
    if sum(end - first for first, end in found) >= WHOLE * len(rows):
        return [(0, len(rows))]
    return found
