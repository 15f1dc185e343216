"""How block rows share out over the multiprocessors, predicted from how many blocks each has."""

from typing import NamedTuple

import numpy as np

MOST_LENGTHS = 8  # different lengths; neighbouring ones count as their mean where there are more
ROUNDING = 1e-9


class Loads(NamedTuple):
    """What the busiest multiprocessor and the longest chain of a plan have: blocks, and the shares that hold them.

    A place holds one CTA at a time; what it runs one after the other is a chain.
    """

    blocks: float  # of the multiprocessor with most blocks
    shares: float  # of that multiprocessor
    chain: float  # blocks of the place with most of them
    links: float  # shares of that place


def loads(lengths: np.ndarray, counts: np.ndarray, resident: int, multiprocessors: int) -> Loads:
    """What a plan puts where.  The longest shares start first, each in the place that is free first.

    Parameters
    ----------
    lengths : float64 or int64 (patterns, rows) or of any shape
        Blocks of a share.
    counts : int64 (patterns, rows), as lengths
        How many shares have so many blocks.
    resident : int
        Shares that run at once on a multiprocessor; the first ones go to different multiprocessors.
    multiprocessors : int
    """
    load, taken = np.zeros(resident * multiprocessors), np.zeros(resident * multiprocessors)
    for length, count in zip(*_different(np.ravel(lengths), np.ravel(counts))):
        if length == 0:
            taken += count / len(taken)
            continue
        order = np.argsort(load, kind="stable")
        low = load[order]
        # As if shares could be cut: the m emptiest places are filled up to one level.
        level = (np.cumsum(low) + count * length) / np.arange(1, len(low) + 1)
        m = int(np.flatnonzero(level > low)[-1]) + 1
        more = np.floor((level[m - 1] - low[:m]) / length + ROUNDING)
        # What is left is less than one share for each of these places.
        left = max(round(count - more.sum()), 0)
        more[np.argsort(low[:m] + more * length, kind="stable")[:left]] += 1
        load[order[:m]] += more * length
        taken[order[:m]] += more
    of_each, shares = (x.reshape(resident, multiprocessors).sum(axis=0) for x in (load, taken))
    busiest, longest = of_each.argmax(), load.argmax()
    return Loads(*map(float, (of_each[busiest], shares[busiest], load[longest], taken[longest])))


def _different(lengths: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The lengths that differ, longest first, and how many shares have each; at most `MOST_LENGTHS`."""
    lengths, counts = lengths[counts > 0], counts[counts > 0]
    lengths, number = np.unique(lengths, return_inverse=True)
    lengths, counts = lengths[::-1].astype(float), np.bincount(number, counts)[::-1]
    if len(lengths) > MOST_LENGTHS:
        blocks = lengths * counts
        before = np.cumsum(blocks) - blocks
        group = np.minimum((before + blocks / 2) / blocks.sum() * MOST_LENGTHS, MOST_LENGTHS - 1).astype(int)
        counts, blocks = np.bincount(group, counts, MOST_LENGTHS), np.bincount(group, blocks, MOST_LENGTHS)
        lengths, counts = blocks[counts > 0] / counts[counts > 0], counts[counts > 0]
    return lengths, counts
