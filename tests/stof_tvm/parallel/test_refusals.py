"""What one rank alone refuses, or is given otherwise, ends the calls of both with its message, and soon."""

import pytest

from stof_tvm.parallel.ranks import Peers
from tests.stof_tvm.parallel.launch import run_ranks

pytestmark = pytest.mark.slow
UNFINISHED = "Make a new process group"  # what ranks are told after a call in which one waited for another's data


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank found, by the names of the checks in refusals.py."""
    return run_ranks("tests.stof_tvm.parallel.refusals", tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("mesh", "InputError: float32='half' is not one of"),
        ("mask", "MaskError: mask must be a Mask"),
        ("context", "InputError: strict must be True or False"),
    ],
)
def test_an_argument_of_build_that_one_rank_has_wrong_is_told_to_the_other(found, argument, error):
    assert found[1]["arguments"][argument].startswith(error)
    told = f"ParallelError: rank 1 failed (the arguments of build): {error}"
    assert found[0]["arguments"][argument].startswith(told)


def test_an_argument_of_build_that_differs_is_named(found):
    for rank in found:
        told = "ParallelError: rank 1 calls with verify True, rank 0 with False: all ranks must mean the same"
        assert rank["arguments"]["verify"].startswith(told)


@pytest.mark.parametrize("engine", ["mesh", "context"])
def test_other_models_of_equal_weights_are_refused_without_verification(found, engine):
    for rank in found:
        told = "ParallelError: rank 1 does not build what rank 0 builds (import): it has another program"
        assert rank["other_models"][engine].startswith(told)


@pytest.mark.parametrize(
    ("first", "where", "error"),
    [
        ("known", "the exchange of keys", "UnsupportedError: a bias with a group"),
        ("new", "a first attention", "UnsupportedError: a bias with a group"),
        ("float32", "the exchange of keys", "InputError: float32='half' is not one of"),
    ],
)
def test_a_later_call_that_one_rank_refuses_ends_that_of_the_other(found, first, where, error):
    here, there = (rank["refused_kinds"][first] for rank in found)
    assert there["refusal"].startswith(error)
    assert here["refusal"].startswith(f"ParallelError: rank 1 failed ({where}): {error}")
    assert max(here["seconds"], there["seconds"]) < 10
    for rank in (here, there):  # nothing was left unfinished where both were at a first call of a kind
        assert (not rank["next"]) if first == "new" else (UNFINISHED in rank["next"])


@pytest.mark.parametrize(("kind", "new"), [("new", 1), ("new on rank 0", 0)])
def test_a_kind_that_is_new_to_one_rank_alone_is_an_error_on_both(found, kind, new):
    for rank in found:
        call = rank["other_kinds"][kind]
        told = f"ParallelError: rank {new} is in a first attention, rank {1 - new} in the exchange of keys: all ranks"
        assert call["refusal"].startswith(told) and call["seconds"] < 10 and UNFINISHED in call["next"]


@pytest.mark.parametrize("kind", ["known", "known mask"])
def test_two_kinds_that_both_ranks_know_are_told_apart(found, kind):
    for number, rank in enumerate(found):
        call = rank["other_kinds"][kind]
        assert call["refusal"].startswith(
            f"ParallelError: rank {1 - number} sent keys of another call than rank {number}"
        )
        assert not call["next"]  # all that was sent was received


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ("one", "rank 1 calls with sink torch.float32, checksum 38041093, rank 0 with None"),
        ("other", "rank 1 calls with sink torch.float32, checksum fefcdffa, rank 0 with torch.float32, checksum 3804"),
        ("later", "rank 1 is in a first attention, rank 0 in the exchange of keys"),
    ],
)
def test_a_sink_is_that_of_all_ranks(found, sink, words):
    for rank in found:
        assert rank["sinks"][sink]["refusal"].startswith(f"ParallelError: {words}")


@pytest.mark.parametrize(("engine", "where"), [("mesh", "an exchange of terms"), ("context", "a first attention")])
def test_inputs_that_one_rank_refuses_end_the_call_of_the_other(found, engine, where):
    own, told = (rank["refused_inputs"][engine] for rank in reversed(found))
    assert own.startswith("InputError: ids must be") and told == f"ParallelError: rank 1 failed ({where}): {own}"
    for rank in found:
        assert (UNFINISHED in rank["refused_inputs"]["mesh, next"]) and not rank["refused_inputs"]["context, next"]


def test_an_error_that_one_rank_catches_pairs_no_later_call_with_another(found):
    own, told = (rank["caught_without_keys"] for rank in reversed(found))
    assert own["documents"].startswith("UnsupportedError: a bias with a group") and not told["documents"]
    assert told["step 0"].startswith("ParallelError: rank 1 failed (a first attention): UnsupportedError: a bias")
    for calls in (own, told):
        later = [calls[f"step {step}"] for step in range(1, 4)]
        assert all("rank 1 is at call" in error and UNFINISHED in error for error in later[:2])
        assert later[2].startswith("ParallelError")


def test_what_one_rank_cannot_exchange_is_told_to_all(found):
    for number, rank in enumerate(found):
        error = rank["failures_of_one"]["call"]
        assert error.startswith(f"ParallelError: rank {number}: the exchange of keys failed, all ranks are there")
        assert error.endswith("rank 1 saw: no memory")


def test_groups_that_are_destroyed_leave_nothing_behind(found):
    for rank in found:
        threads = rank["destroyed_groups"]["threads"]
        assert threads[-1] <= threads[0]
        assert rank["destroyed_groups"]["again"].startswith("InputError: the process group was destroyed")


def test_data_that_comes_when_a_look_is_due_is_no_failure():
    class Work:
        looks = 0

        def wait(self, *timeout):
            Work.looks += 1
            if timeout:
                raise RuntimeError("timed out")

        def is_completed(self):
            return True

    Peers.wait(None, Work(), "an exchange", on_cpu=True)
    assert Work.looks == 2


def test_processes_may_be_in_unequal_numbers_of_groups(tmp_path):
    found = run_ranks("tests.stof_tvm.parallel.groups", tmp_path, 3)
    names = [["0", "1", "3", "world"], ["0", "2", "3", "world"], ["1", "2", "world"]]
    assert [sorted(rank["attentions"]) for rank in found] == names
    assert not any(error for rank in found for error in rank["attentions"].values())
