"""`stof mask`: statistics and pictures."""

from pathlib import Path

import numpy as np
import pytest
import torch

from stof_tvm import masks


def test_statistics(stof):
    status, found, errors = stof("mask", "causal() & sliding_window(20)", 96, 80, "--block", "16x32", "--json")
    mask = masks.causal() & masks.sliding_window(20)
    dense = np.zeros((96, 96), bool)
    dense[:, :80] = mask.dense(96, 80).numpy()
    kept = dense.reshape(6, 16, 3, 32).sum(axis=(1, 3))
    assert (status, errors) == (0, "")
    assert (found["mask"], found["q_len"], found["kv_len"], found["block"]) == (repr(mask), 96, 80, [16, 32])
    assert found["density"] == pytest.approx(dense.sum() / (96 * 80))
    assert (found["blocks"], found["listed"]) == (18, np.count_nonzero(kept))
    assert (found["full"], found["part"]) == (np.sum(kept == 512), np.sum((kept > 0) & (kept < 512)))
    assert found["block_density"] == pytest.approx(found["listed"] / 18)
    compiled = mask.compile(96, 80, (16, 32))
    assert found["bytes"] == sum(array.nbytes for array in compiled.arrays.values()) and found["compile_seconds"] >= 0


def test_text(stof):
    status, text, _ = stof("mask", "per_head([causal, ~causal])", 128)
    assert status == 0
    assert "patterns  2 (batch 1, heads 2)" in text and "kept      50.00% of the elements" in text
    assert "6 of 8 of 64×64 listed" in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["causal", "--from-tensors", "q.pt", "k.pt"], "the tensor q.pt cannot be read: No such file or directory"),
        (["causal", 64, "--picture", "no_such_folder/mask.png"], "there is no folder no_such_folder"),
    ],
)
def test_what_fails(stof, work, arguments, why):
    status, text, errors = stof("mask", *arguments)
    assert status == 1 and text == "" and errors.startswith("stof: ") and errors.count("\n") == 1 and why in errors


TENSORS = "--from-tensors", "q.pt", "k.pt"
RULES_GO = "rule of stof_tvm.masks.runtime, which finds its blocks in each call: give --rule --from-tensors Q K"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["causal", 64, "--block", "20"], "multiple of 8"),
        (["nothing", 64], "there is no mask 'nothing'"),
        (["bigbrid", 64], "did you mean 'bigbird'?"),
        (["document([32, 16])", 64], "sum to 48"),
        (["causal", 64, "--picture", "mask.png", "--head", 3], "head 3 is not in 0…0"),
        (["causal", 64, "--head", 0], "give --picture FILE"),
        (["causal", 64, "--batch", 1], "give --picture FILE"),
        (["causal"], "give q_len, the number of queries, or --from-tensors Q K"),
        (["causal", 64, "--within", "causal"], "give --from-tensors Q K"),
        (["xattention", 64, "--rule"], "--rule is about tensors, from which a rule finds its blocks"),
        (["causal", "--rule", *TENSORS], "'causal' is a mask that is known in advance"),
        (["xattention", 64], f"'xattention' is a {RULES_GO}"),
        (["xattention(8, 0.5)", *TENSORS], f"'xattention' is a {RULES_GO}"),
        (["causal & sparge", *TENSORS], f"'sparge' is a {RULES_GO}"),
        (["xatention", 64], f"did you mean 'xattention'? That is a {RULES_GO}"),
        (["xatention", "--rule", *TENSORS], "did you mean 'xattention'?"),
        (["causl", "--rule", *TENSORS], "did you mean 'causal'?"),
        (["causal", *TENSORS, "--within", "causl"], "did you mean 'causal'?"),
        (["causal", *TENSORS, "--within", "sparge"], "'sparge' is a rule of stof_tvm.masks.runtime"),
        (["causal", 64, *TENSORS], "leave q_len out"),
    ],
)
def test_wrong_usage(stof, work, arguments, why):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    status, text, errors = stof("mask", *arguments)
    *usage, line = errors.splitlines()
    assert status == 2 and text == "" and usage[0].startswith("usage: stof mask")
    assert line.startswith("stof mask: error: ") and why in line


def test_a_picture_has_a_panel_for_each_head(stof, tmp_path):
    matplotlib = pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    widths = []
    for head in ((), ("--head", 1)):
        file = tmp_path / "mask.png"
        status, found, _ = stof("mask", "per_head([causal, ~causal])", 64, "--picture", file, *head, "--json")
        assert status == 0 and found["picture"] == str(file)
        widths.append(matplotlib.image.imread(file).shape[1])
    assert widths[0] > 1.5 * widths[1]
    svg = tmp_path / "mask.svg"
    assert stof("mask", "causal", 64, "--picture", svg)[0] == 0
    assert "<svg" in svg.read_text()


def test_recall_of_tensors(stof, tmp_path):
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 48, 8), torch.randn(2, 2, 48, 8, dtype=torch.bfloat16)
    for name, tensor in (("q.pt", q), ("k.pt", k)):
        torch.save(tensor, tmp_path / name)
    files = tmp_path / "q.pt", tmp_path / "k.pt"
    options = "--within", "causal", "--scale", 0.5
    status, found, errors = stof("mask", "a_shape(2, 8)", "--from-tensors", *files, *options, "--json")
    assert (status, errors) == (0, "")
    expected = masks.recall(masks.a_shape(2, 8), q, k, 0.5, within=masks.causal())
    assert found["recall"] == pytest.approx(expected.mean) and (found["q_len"], found["kv_len"]) == (48, 48)
    assert found["recall_by_head"] == pytest.approx(expected.heads.mean(0).tolist())
    assert found["density"] == pytest.approx(masks.a_shape(2, 8).density(48))
    status, text, errors = stof("mask", "causal", "--from-tensors", *files, "--scale", "nan")
    assert status == 1 and "is NaN: they hold NaN or infinities" in errors
    status, text, _ = stof("mask", "a_shape(2, 8)", "--from-tensors", *files)
    assert status == 0 and "recall    " in text and text.count("%") >= 6


@pytest.fixture
def saved(tmp_path):
    """q and k, and the files that hold them."""
    torch.manual_seed(1)
    q, k = torch.randn(2, 4, 200, 16) * 2, torch.randn(2, 2, 200, 16, dtype=torch.bfloat16)
    files = tmp_path / "q.pt", tmp_path / "k.pt"
    for file, tensor in zip(files, (q, k)):
        torch.save(tensor, file)
    return q, k, files


def test_what_a_rule_keeps_of_tensors(stof, saved):
    q, k, files = saved
    options = "--within", "causal", "--scale", 0.5
    status, found, errors = stof(
        "mask", "--from-tensors", *files, *options, "--json", "--rule", "xattention(8, 0.5, 32)"
    )
    rule = masks.runtime.xattention(8, 0.5, 32)
    mask = rule.mask(q * 2, k)  # the default scale is a quarter
    assert (status, errors) == (0, "") and found["mask"] == repr(rule) and found["block"] == [32, 32]
    assert (found["batch"], found["heads"], found["patterns"]) == (2, 4, 8)
    assert found["density"] == pytest.approx(mask.density(200)) and 0.1 < found["density"] < 0.5
    assert found["recall"] == pytest.approx(masks.recall(rule, q, k, 0.5, within=masks.causal()).mean, abs=1e-6)
    assert mask.density(200) != rule.mask(q, k).density(200)


def test_a_rule_may_have_rules_of_heads_and_other_blocks(stof, saved):
    q, k, files = saved
    text = "per_head([sparge, a_shape(2, 8), vertical_slash(9, 8), a_shape(2, 8)]) & causal"
    status, found, _ = stof("mask", text, "--rule", "--from-tensors", *files, "--block", "16x32", "--json")
    rule = masks.runtime.per_head(
        [masks.runtime.sparge(), masks.a_shape(2, 8), masks.runtime.vertical_slash(9, 8), masks.a_shape(2, 8)]
    )
    assert status == 0 and found["block"] == [16, 32]
    assert found["density"] == pytest.approx((rule & masks.causal()).mask(q, k).density(200))


def test_a_picture_of_a_rule(stof, saved, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    picture = tmp_path / "rule.svg"
    options = "--rule", "--from-tensors", *saved[2], "--batch", 1, "--head", 2, "--picture", picture
    status, text, errors = stof("mask", "low_rank(k=2)", *options)
    assert (status, errors) == (0, "") and "low_rank(k=2" in text and "recall    " in text
    assert picture.read_text().count("<svg") == 1
    status, _, errors = stof("mask", "low_rank(k=2)", *options[:-4], "--head", 4, "--picture", picture)
    assert status == 2 and "head 4 is not in 0…3" in errors


def save(folder, **tensors):
    for name, tensor in tensors.items():
        torch.save(tensor, folder / f"{name}.pt")
    return "--from-tensors", *(folder / f"{name}.pt" for name in tensors)


def test_how_tensors_were_read_is_told(stof, saved):
    status, text, _ = stof("mask", "causal", "--from-tensors", *saved[2])
    line = "read as   q: batch 2, 4 heads, 200 tokens, head size 16; k: 2 heads, 200 tokens"
    assert status == 0 and line in text.splitlines() and "note" not in text
    _, found, _ = stof("mask", "causal", "--from-tensors", *saved[2], "--json")
    assert found["q_shape"] == [2, 4, 200, 16] and found["k_shape"] == [2, 2, 200, 16] and found["note"] is None


def test_tensors_with_tokens_before_heads(stof, tmp_path):
    """(batch, tokens, heads, size) may be read as (batch, heads, tokens, size): what gives it away is told."""
    files = save(tmp_path, q=torch.randn(1, 40, 4, 8), k=torch.randn(1, 40, 2, 8))
    status, text, _ = stof("mask", "causal", *files)
    assert status == 0 and "read as   q: batch 1, 40 heads, 4 tokens, head size 8; k: 40 heads, 2 tokens" in text
    (note,) = [line for line in text.splitlines() if line.startswith("note")]
    assert "k has more heads (40) than tokens (2)" in note and "transpose(1, 2)" in note
    assert "more heads (40)" in stof("mask", "causal", *files, "--json")[1]["note"]
    # Near misses: one query beside a long cache, and as many heads as tokens.
    for sizes in ((1, 8, 1, 8), (1, 8, 40, 8)), ((1, 8, 8, 8), (1, 8, 8, 8)):
        q, k = map(torch.randn, sizes)
        assert "note" not in stof("mask", "causal", *save(tmp_path, q=q, k=k))[1]


@pytest.mark.parametrize(
    ("q", "k", "is_turned"), [((1, 40, 4, 8), (1, 60, 2, 8), True), ((1, 3, 40, 8), (1, 2, 30, 8), False)]
)
def test_tensors_that_fit_only_with_tokens_before_heads(stof, tmp_path, q, k, is_turned):
    status, text, errors = stof("mask", "causal", *save(tmp_path, q=torch.randn(q), k=torch.randn(k)))
    assert status == 1 and text == "" and "q a multiple of k's heads" in errors
    assert ("if they are (batch, length, heads, size), save q.transpose(1, 2)" in errors) == is_turned


@pytest.mark.parametrize(
    "content", [[torch.ones(2)], {"q": 1}, torch.ones(2, 2).to_sparse(), Path("x"), b"PK\3\4", b""]
)
def test_files_that_hold_no_tensor(stof, tmp_path, content):
    file = tmp_path / "q.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    status, text, errors = stof("mask", "causal", "--from-tensors", file, file)
    assert status == 1 and text == "" and errors.startswith("stof: ") and errors.count("\n") == 1 and "q.pt" in errors
