"""How block rows share out over multiprocessors: against giving out the shares one by one."""

import heapq

import numpy as np
import pytest

from tir_kernels.attention.prediction.shares import MOST_LENGTHS, Loads, loads


def one_by_one(lengths, counts, resident, multiprocessors):
    """The same, longest first, each share to the place that is free first."""
    places = [(0.0, place) for place in range(resident * multiprocessors)]
    load, taken = np.zeros(len(places)), np.zeros(len(places))
    for length in sorted(np.repeat(np.ravel(lengths), np.ravel(counts)), reverse=True):
        at, place = heapq.heappop(places)
        load[place], taken[place] = at + length, taken[place] + 1
        heapq.heappush(places, (at + length, place))
    of_each, shares = (x.reshape(resident, multiprocessors).sum(axis=0) for x in (load, taken))
    return Loads(of_each.max(), shares[of_each.argmax()], load.max(), taken[load.argmax()])


@pytest.mark.parametrize("resident, multiprocessors", [(1, 4), (3, 4), (4, 132)])
@pytest.mark.parametrize("shares", [3, 11, 40, 5000])
@pytest.mark.parametrize("different", [1, 2, MOST_LENGTHS])
def test_few_lengths_are_given_out_as_one_by_one(resident, multiprocessors, shares, different):
    rng = np.random.default_rng(shares + different)
    lengths = rng.permutation(np.arange(1, different + 1))
    counts = rng.multinomial(shares, np.ones(different) / different)
    found = loads(lengths, counts, resident, multiprocessors)
    expected = one_by_one(lengths, counts, resident, multiprocessors)
    assert found.blocks == pytest.approx(expected.blocks) and found.chain == pytest.approx(expected.chain)
    assert 0 < found.links <= shares and 0 < found.shares <= shares


def test_a_long_row_delays_only_its_own_place():
    assert loads([64, 5], [1, 1000], 2, 10).chain == one_by_one([64, 5], [1, 1000], 2, 10).chain
    assert loads([64, 5], [1, 10], 1, 20) == Loads(blocks=64, shares=1, chain=64, links=1)


def test_the_first_shares_go_to_different_multiprocessors():
    assert loads([7], [10], 4, 10) == Loads(blocks=7, shares=1, chain=7, links=1)
    assert loads([7], [11], 4, 10) == Loads(blocks=14, shares=2, chain=7, links=1)


@pytest.mark.parametrize("resident", [1, 3])
def test_many_lengths_are_about_as_one_by_one(resident):
    lengths, counts = np.arange(1, 129), np.full(128, 12)
    found, expected = (f(lengths, counts, resident, 132) for f in (loads, one_by_one))
    assert found.blocks == pytest.approx(expected.blocks, rel=0.05)
    assert found.chain == pytest.approx(expected.chain, rel=0.15)
    assert found.blocks >= lengths @ counts / 132


def test_rows_without_blocks_and_no_rows_at_all():
    assert loads([0, 3], [5, 2], 1, 4).blocks == 3
    assert loads([0], [5], 2, 4)[0::2] == (0, 0)
    assert loads([3, 4], [0, 0], 2, 4).blocks == 0
    assert loads(np.array([[3, 4], [5, 1]]), np.array([[1, 0], [2, 1]]), 1, 4).blocks == 5
