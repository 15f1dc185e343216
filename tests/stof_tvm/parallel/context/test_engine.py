"""Engines of two processes that share sequences: results, what is refused, and what happens when one fails."""

import pytest

from tests.stof_tvm.parallel.context.engines import CASES, LENGTH
from tests.stof_tvm.parallel.launch import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    return run_ranks("tests.stof_tvm.parallel.context.engines", tmp_path_factory.mktemp("engines"))


@pytest.mark.parametrize("name", CASES)
def test_ranks_give_what_one_process_gives(found, name):
    layers = CASES[name][1]
    for rank in found:
        case = rank["cases"][name]
        assert case["verification"] == "passed" and case["error"] < 3e-5
        assert case["sites"] == layers and case["part_is_right"]
    assert sum(rank["cases"][name]["tokens"] for rank in found) == LENGTH


def test_the_report_tells_who_has_what_and_what_is_received(found):
    text = found[0]["cases"]["decoder, window"]["text"]
    assert "context parallel on 2 ranks: 160 tokens of 2 sequence(s), 80 a rank (equal runs, 0.0% off balance)" in text
    # 12 keys before the first row of the second rank, in 4 heads of 2 sequences
    assert "one receives 96 rows of keys at most" in text
    documents = found[0]["cases"]["rotary decoder, documents"]["text"]
    assert "causal() & document((70, 50, 40))" in documents


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ("neighbours", "convolution.default in conv cannot be computed by ranks that share a sequence"),
        (
            "mean of tokens",
            "mean.dim in the root module cannot be computed by ranks that share a sequence: it goes over",
        ),
        ("last token", "select.int in the root module cannot be computed by ranks that share a sequence: it asks for"),
        ("shift", "cannot be computed by ranks that share a sequence"),
        ("bias of pairs", "has a mask or bias that calls compute for pairs of tokens"),
        ("sum of tokens", "cannot be computed by ranks that share a sequence: it sums over tokens; leave"),
    ],
)
def test_what_mixes_tokens_is_refused_by_name(found, mix, words):
    for rank in found:
        assert rank["mixes"][mix].startswith("UnsupportedError") and words in rank["mixes"][mix]


def test_what_mixes_features_is_not_refused(found):
    assert found[0]["mixes"]["mean of features"] == found[1]["mixes"]["mean of features"] == ""


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("mesh", "InputError: mesh and context_parallel divide a model in two ways, which are not"),
        ("replaceable", "leave replaceable_masks out"),
        ("number", "context_parallel is a DeviceMesh of one dimension or a ProcessGroup, got int"),
        ("no tokens", "InputError: context_parallel needs the first input to be of shape (batch, length, …)"),
        ("no batch", "context_parallel needs an example of one sequence or more, of two tokens or more; got (0, 160)"),
        ("padding", "attention_mask tells tokens from padding"),
        ("short", "InputError: 15 tokens are fewer than 8 for each of 2 ranks"),
        ("path", "mask path 'nowhere' matches no attention"),
        ("rule", "ranks that share a sequence have some of its tokens only"),
        ("masks", "ParallelError: rank 1 does not build what rank 0 builds (masks)"),
        ("call", "InputError: ids must be an int64 tensor of shape (2, 160)"),
        ("with_mask", "has no with_mask(mask)"),
        ("save", "this engine is one of 2 ranks"),
    ],
)
def test_arguments_are_refused_by_name(found, argument, words):
    for rank in found:
        assert words in rank["arguments"][argument]


def test_an_error_of_one_rank_ends_all_with_its_message(found):
    assert found[1]["arguments"]["one"].startswith("MaskError")
    assert "ParallelError: rank 1 failed (compilation): MaskError" in found[0]["arguments"]["one"]


def test_a_rank_that_is_killed_is_named_by_the_others(found):
    told = "ParallelError: rank 0: the exchange of keys failed, rank 1 is gone or does not answer"
    assert found[0]["killed"]["call"].startswith(told)
