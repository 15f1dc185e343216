"""Runs of a rank's rows that are computed together."""

import numpy as np

from stof_tvm.parallel.context.lists import BLOCK

GAP = 16 * BLOCK  # rows that are not worth a launch of their own before and after them
MOST = 4  # launches
WHOLE = 0.75  # of the rows: above that the rest makes no difference


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
