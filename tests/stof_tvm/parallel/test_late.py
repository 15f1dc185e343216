"""Ranks that do not meet in the first call of a group."""

import pytest

from tests.stof_tvm.parallel.launch import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    return run_ranks("tests.stof_tvm.parallel.late", tmp_path_factory.mktemp("late"))


@pytest.mark.parametrize("late", [0, 1])
def test_a_group_whose_ranks_did_not_meet_computes_nothing_any_more(found, late):
    """The late rank would take the other's keys of its next call for those of the first."""
    early = found[1 - late]["calls_after_one_that_a_rank_came_to_late"][f"rank {late} late"]
    assert early[0].startswith("ParallelError") and f"rank {late} did not come" in early[0]
    assert all("Make a new process group" in text for text in early[1:])
    behind = found[late]["calls_after_one_that_a_rank_came_to_late"][f"rank {late} late"]
    assert all(text.startswith("ParallelError") for text in behind)


def test_a_new_group_computes(found):
    for rank in found:
        assert rank["a_new_group"].startswith("error ") and float(rank["a_new_group"].split()[1]) < 1e-5
