"""Sharing out tokens by their work: what is tried, swaps, and what cannot be balanced."""

import numpy as np

from stof_tvm.parallel.context.assignment import TOLERANCE, assign, imbalance

NO_CUTS = lambda: np.zeros(0, np.int64)  # noqa: E731


def distance_moved(owner: np.ndarray) -> float:
    """Borders between ranks: fewer where runs are long."""
    return float(np.count_nonzero(np.diff(owner)))


def loads(owner, work) -> np.ndarray:
    return np.bincount(owner, work)


def test_equal_work_is_cut_into_equal_runs():
    owner, way = assign(np.ones(4096, np.int64), NO_CUTS, distance_moved, 4)
    assert way == "equal runs" and (owner == np.arange(4096) // 1024).all()


def test_growing_work_is_paired_from_both_ends():
    work = np.arange(8192)
    owner, way = assign(work, NO_CUTS, distance_moved, 4)
    assert way == "two runs each" and np.count_nonzero(np.diff(owner)) == 6
    assert imbalance(loads(owner, work)) < 0.001 and (loads(owner, np.ones(8192)) == 2048).all()


def test_a_few_heavy_rows_are_swapped_and_the_rest_stays():
    work = np.full(16384, 10)
    work[:256] = 400
    owner, _ = assign(work, NO_CUTS, distance_moved, 4)
    assert imbalance(loads(owner, work)) <= TOLERANCE
    assert (owner != np.arange(16384) // 4096).sum() < 16384 / 4


def test_documents_stay_whole_where_that_is_balanced():
    sizes = np.array([1000, 900, 1100, 1000])
    work = np.ones(4000, np.int64)
    owner, way = assign(work, lambda: np.cumsum(sizes)[:-1], lambda owner: float(owner[0] != owner[999]), 2)
    assert imbalance(loads(owner, work)) <= TOLERANCE
    # What moves nothing ends the search: equal runs cut the first document nowhere.
    assert way == "equal runs"
    inside = np.repeat(np.arange(4), sizes)
    cuts = lambda owner: float(sum(len(np.unique(owner[inside == d])) - 1 for d in range(4)))  # noqa: E731
    owner, way = assign(work, lambda: np.cumsum(sizes)[:-1], cuts, 2)
    assert way == "whole documents" and cuts(owner) == 0 and (loads(owner, work) == 2000).all()


def test_smaller_chunks_are_tried_and_one_heavy_token_cannot_be_shared():
    work = np.ones(512, np.int64)
    work[100] = 100000
    owner, _ = assign(work, NO_CUTS, distance_moved, 2)
    assert sorted(np.unique(owner)) == [0, 1] and imbalance(loads(owner, work)) > 0.9


def test_rows_without_work_behind_all_others_belong_to_a_rank():
    for ranks in (2, 3, 5, 8):
        for length in (128, 145, 256, 285, 1000):
            for real in range(8, length, 24):
                owner, _ = assign((np.arange(length) < real).astype(np.int64), NO_CUTS, distance_moved, ranks)
                assert set(owner.tolist()) == set(range(ranks)), (ranks, length, real)


def test_rows_without_work_and_one_rank():
    owner, _ = assign(np.zeros(64, np.int64), NO_CUTS, distance_moved, 8)
    assert (loads(owner, np.ones(64)) == 8).all() and imbalance(np.zeros(3)) == 0
    assert not assign(np.arange(64), NO_CUTS, distance_moved, 1)[0].any()
