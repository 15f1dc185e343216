"""Two processes on the CPU build and run engines together, and see each other fail."""

import pytest

from tests.stof_tvm.parallel.launch import run_ranks


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each rank found, by the names of the checks in ranks.py."""
    return run_ranks("tests.stof_tvm.parallel.ranks", tmp_path_factory.mktemp("ranks"))


pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "attentions", "mlps", "sums"), [("bert", 1, 1, 2), ("gpt", 1, 1, 2), ("t5", 3, 2, 5)])
def test_each_family_is_divided_by_heads_and_columns_and_computes_what_pytorch_does(
    found, name, attentions, mlps, sums
):
    for rank in found:
        engine = rank["families"][name]
        assert engine["verification"] == "passed"
        expected = (
            f"{attentions} of {attentions} attentions by heads, {mlps} MLPs by columns and rows, {sums} sums over ranks"
        )
        assert expected in engine["notes"][0]
        assert any("each rank computes" in note and "hidden features of" in note for note in engine["notes"])
        assert not any("divided:" in note for note in engine["notes"])


def test_grouped_heads_give_what_one_process_gives_with_its_share_of_the_weights(found):
    for rank in found:
        engine = rank["llama"]
        assert engine["verification"] == "passed"
        assert engine["error"] < 1e-5
        # Embeddings (50 x 32, twice) are whole; the other matrices are halves.
        embeddings = 2 * 50 * 32 * 4
        assert engine["bytes"] - embeddings < 0.55 * (engine["bytes_alone"] - embeddings)
        assert engine["save"].startswith("UnsupportedError: this engine is one of 2 ranks")


def test_the_masks_of_heads_go_with_their_heads(found):
    for number, rank in enumerate(found):
        engine = rank["head_masks"]
        assert (engine["verification"], engine["heads"], engine["all_heads"]) == ("passed", 2, 4)
        assert engine["mask"].startswith(f"heads {2 * number} to {2 * number + 1} of per_head")


def test_heads_that_ranks_do_not_divide_stay_whole_and_the_report_says_so(found):
    engine = found[0]["odd_heads"]
    assert engine["verification"] == "passed"
    assert "0 of 1 attentions by heads, 1 MLPs" in engine["notes"][0]
    assert "whole on every rank: attention layers.0, because 2 ranks do not divide 3 heads" in engine["text"]


def test_caches_are_divided_with_their_heads(found):
    for rank in found:
        engine = rank["cache"]
        assert engine["verification"] == "passed"
        assert engine["shapes"] == {"keys": [1, 1, 16, 8], "values": [1, 1, 16, 8]}
        assert engine["whole"] == [1, 2, 16, 8]


def test_the_columns_of_the_product_to_a_vocabulary_are_gathered(found):
    for rank in found:
        assert rank["vocabulary"]["verification"] == "passed"
        told = "each rank computes 25 of the 50 results of the last product, and receives the others"
        assert told in rank["vocabulary"]["notes"]


def test_weights_come_from_a_file(found):
    for rank in found:
        assert rank["from_file"]["verification"] == "passed" and rank["from_file"]["error"] < 1e-5
        assert "1 of 1 attentions by heads" in rank["from_file"]["notes"][0]


def test_an_error_on_one_rank_ends_all_with_its_message(found):
    own, others = found[1]["one_fails"]["refusal"], found[0]["one_fails"]["refusal"]
    assert own.startswith("MaskError: mask path 'nowhere'")
    assert others == f"ParallelError: rank 1 failed (masks): {own}"


def test_a_result_that_is_wrong_on_one_rank_is_an_error_on_all(found):
    assert found[1]["wrong_on_one"]["refusal"].startswith("VerificationError")
    assert found[0]["wrong_on_one"]["refusal"].startswith("ParallelError: rank 1 failed (verification)")


def test_ranks_with_other_weights_are_refused(found):
    for rank in found:
        for where in ("refusal", "deep"):
            assert "rank 1 does not build what rank 0 builds (import)" in rank["other_weights"][where]


def test_ranks_with_other_masks_are_refused(found):
    for rank in found:
        assert "rank 1 does not build what rank 0 builds (masks)" in rank["other_masks"]["refusal"]


def test_what_does_not_go_with_a_mesh_is_refused_by_name(found):
    refused = found[0]["arguments"]
    assert "leave replaceable_masks out" in refused["replaceable"]
    assert "got int" in refused["mesh"]
    assert "mesh has 2 dimensions" in refused["planes"]


def test_a_rank_that_is_late_is_named_within_the_timeout(found):
    assert "rank 1 is gone, or did not answer within 1 s" in found[0]["late"]["refusal"]
    assert found[0]["late"]["seconds"] < 3


def test_a_call_after_one_that_failed_on_one_rank_alone_is_an_error(found):
    for rank in range(2):
        assert (
            found[rank]["refused_inputs"]["all"].startswith("InputError") and not found[rank]["refused_inputs"]["after"]
        )
    assert found[1]["refused_inputs"]["alone"].startswith("InputError")
    assert found[1]["refused_inputs"]["next"].startswith(
        "ParallelError: rank 1: rank 0 is gone, or did not answer within 2"
    )


def test_a_rank_that_is_killed_is_named_in_a_call_and_in_a_build(found):
    killed = found[0]["killed"]
    assert killed["call"].startswith("ParallelError: rank 0: an exchange of terms failed, rank 1 is gone")
    assert "rank 1 is gone" in killed["build"]
    assert killed["seconds"] < 60
