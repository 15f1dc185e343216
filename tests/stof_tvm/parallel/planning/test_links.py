"""What moving bytes takes: measured points, between them, more ranks, several hosts."""

import pytest

from stof_tvm.parallel.planning.links import MIB, SMALL_US, Links

LINKS = Links(host=8, network=50e3)


@pytest.mark.parametrize(("mib", "us"), [(1, 18), (4, 36), (16, 79), (64, 251), (256, 890), (32, 79 + 172 / 3)])
def test_two_ranks_take_what_was_measured(mib, us):
    assert LINKS.all_reduce_us(mib * MIB, 2) == pytest.approx(us)


def test_exchanges():
    assert LINKS.exchange_us(16 * MIB, True) == 88 and LINKS.exchange_us(0, True) == 0
    assert LINKS.exchange_us(512 * MIB, True) == pytest.approx(883 + 256 * (883 - 259) / 192)
    assert SMALL_US < LINKS.exchange_us(1000, True) < 12


@pytest.mark.parametrize(("mib", "us"), [(0.01, 6), (16, 41), (128, 68)])
def test_two_ranks_add_up_terms_that_they_stored_in_each_others_memory(mib, us):
    assert LINKS.sum_us(mib * MIB, 2, 4.3e6) == pytest.approx(us, rel=0.02)


def test_other_sums_are_all_reduces():
    for links, ranks in ((LINKS, 1), (LINKS, 4), (Links(host=1), 2)):
        assert links.sum_us(16 * MIB, ranks, 4.3e6) == links.all_reduce_us(16 * MIB, ranks)
    assert LINKS.sum_us(0, 2, 4.3e6) == 0


def test_more_ranks_move_more_in_an_all_reduce():
    assert LINKS.all_reduce_us(64 * MIB, 4) == pytest.approx(LINKS.all_reduce_us(96 * MIB, 2))
    assert LINKS.all_reduce_us(64 * MIB, 1) == 0


def test_hosts_are_joined_by_the_network():
    assert LINKS.exchange_us(64 * MIB, False) == pytest.approx(SMALL_US + 64 * MIB / 50e3)
    assert LINKS.all_reduce_us(64 * MIB, 16) == pytest.approx(SMALL_US + 64 * MIB * 30 / 16 / 50e3)
    assert Links(host=16).all_reduce_us(64 * MIB, 16) < LINKS.all_reduce_us(64 * MIB, 16)
    assert Links(network=1e9).exchange_us(64 * MIB, False) == 259  # no faster than a host's links
