"""Which rank has which tokens, so that all have equally many kept blocks and few keys are moved.

Five ways to share out chunks of consecutive tokens are tried: equal runs; runs of equal work, if they are not much
longer or shorter than the mean; two runs each, from both ends towards the
middle (what balances causal masks); whole documents, largest first (which moves nothing); chunks dealt by their work
(which balances anything).  Where one is out of balance, chunks are swapped between the ranks with the most and the
least work.  Of those that are balanced then, the one that moves the fewest keys is taken.
"""

from collections.abc import Callable, Iterator

import numpy as np

TOLERANCE = 0.03  # of the ranks' mean work, by which the largest may exceed it
LONGEST = 1.1  # tokens of a run of equal work over the mean: what is done for each token is out of balance by as much
CHUNKS = (128, 64, 32, 16, 8)  # tokens, tried in turn until the work is balanced
LEAST_CHUNKS = 16  # of a rank: with fewer, a swap is too coarse


def assign(
    work: np.ndarray, free: Callable[[], np.ndarray], moved: Callable[[np.ndarray], float], ranks: int
) -> tuple[np.ndarray, str]:
    """The rank of each token, int64 (length,), and the name of the way that was taken.

    Parameters
    ----------
    work : int64 (length,)
        Kept blocks of each token's row.
    free : function
        Gives int64: the tokens before which no kept pair crosses, without 0.
    moved : function
        What a sharing moves, of the rank of each token.
    ranks : int
        Number of ranks.
    """
    length = len(work)
    sizes = [size for size in CHUNKS if length >= size * ranks * LEAST_CHUNKS] or [CHUNKS[-1]]
    best = None
    cuts = free() if ranks > 1 else np.zeros(0, np.int64)
    for size in sizes:
        for name, starts, of_chunk in _candidates(work, cuts, size, ranks):
            chunks = np.add.reduceat(work, starts)
            _balance(of_chunk, chunks, ranks)
            owner = np.repeat(of_chunk, np.diff(starts, append=length))
            if len(np.unique(owner)) < ranks:  # a rank would have nothing to do
                continue
            off = imbalance(np.bincount(owner, work, ranks))
            if off > TOLERANCE and (best is None or off < best[0][0]):
                best = (off, 0.0), owner, name
            elif off <= TOLERANCE:
                cost = TOLERANCE, moved(owner)
                if best is None or cost < best[0]:
                    best = cost, owner, name
                if cost[1] == 0:
                    return owner, name
        if best is not None and best[0][0] <= TOLERANCE:
            break
    assert best is not None
    return best[1], best[2]


def imbalance(work: np.ndarray) -> float:
    """By what share the largest work of a rank exceeds the mean."""
    mean = work.mean()
    return float(work.max() / mean) - 1 if mean else 0.0


def _candidates(work, cuts, size: int, ranks: int) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(name, first token of each chunk, rank of each chunk) of every way."""
    starts = np.arange(0, len(work), size)
    number = np.arange(len(starts))
    yield "equal runs", starts, number * ranks // len(starts)
    chunks = np.add.reduceat(work, starts)
    by_work = ((np.cumsum(chunks) - chunks / 2) / max(chunks.sum(), 1) * ranks).astype(np.int64)
    by_work = np.minimum(by_work, ranks - 1)  # behind all work there may be chunks without
    if np.bincount(by_work).max() <= LONGEST * len(starts) / ranks:
        yield "runs of equal work", starts, by_work
    stripe = number * 2 * ranks // len(starts)
    yield "two runs each", starts, np.minimum(stripe, 2 * ranks - 1 - stripe)
    bounds = _long_enough(cuts, size, len(work))
    if len(bounds) >= ranks:
        documents = _largest_first(np.add.reduceat(work, bounds), ranks)
        inside = [np.arange(a, b, size) for a, b in zip(bounds, [*bounds[1:], len(work)])]
        pieces = np.concatenate(inside)
        yield "whole documents", pieces, np.repeat(documents, [len(each) for each in inside])
    order = np.argsort(-chunks, kind="stable")
    turn = np.empty_like(number)
    turn[order] = number % (2 * ranks)
    yield "dealt chunks", starts, np.minimum(turn, 2 * ranks - 1 - turn)


def _long_enough(cuts: np.ndarray, size: int, length: int) -> np.ndarray:
    """The starts of documents, short ones joined to the one before until they have `size` tokens."""
    bounds = [0]
    for cut in cuts.tolist():
        if cut - bounds[-1] >= size and length - cut >= size:
            bounds.append(cut)
    return np.array(bounds)


def _largest_first(work: np.ndarray, ranks: int) -> np.ndarray:
    """The rank of each document: the largest goes to the rank with the least work so far."""
    loads, owner = np.zeros(ranks), np.zeros(len(work), np.int64)
    for document in np.argsort(-work, kind="stable"):
        owner[document] = np.argmin(loads)
        loads[owner[document]] += work[document] + 1  # so that documents without work are shared out, too
    return owner


def _balance(owner: np.ndarray, work: np.ndarray, ranks: int) -> None:
    """Swap chunks between the ranks with the most and the least work until they are balanced; changes `owner`."""
    loads = np.bincount(owner, work, ranks)
    for _ in range(len(owner)):
        if imbalance(loads) <= TOLERANCE:
            return
        most, least = int(loads.argmax()), int(loads.argmin())
        gap = loads[most] - loads[least]
        given, taken = np.flatnonzero(owner == most), np.flatnonzero(owner == least)
        if not len(given) or not len(taken):
            return
        taken = taken[np.argsort(work[taken], kind="stable")]
        wanted = work[given] - min(loads[most] - loads.mean(), gap / 2)
        near = np.searchsorted(work[taken], wanted)
        pairs = np.stack([np.clip(near - 1, 0, len(taken) - 1), np.clip(near, 0, len(taken) - 1)])
        change = work[given] - work[taken[pairs]]
        off = np.where((change > 0) & (change < gap), np.abs(work[taken[pairs]] - wanted), np.inf)
        which, chunk = np.unravel_index(off.argmin(), off.shape)
        if not np.isfinite(off[which, chunk]):
            return
        a, b = given[chunk], taken[pairs[which, chunk]]
        owner[a], owner[b] = least, most
        loads[most] -= work[a] - work[b]
        loads[least] += work[a] - work[b]
