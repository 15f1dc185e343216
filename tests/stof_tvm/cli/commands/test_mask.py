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
        (["causal", "--rule", "--from-tensors", "q.pt", "k.pt"], "'causal' is a mask that is known in advance"),
        (["xattention", "--from-tensors", "q.pt", "k.pt"], "there is no mask 'xattention'"),
        (["causal", 64, "--from-tensors", "q.pt", "k.pt"], "leave q_len out"),
        (["causal", "--from-tensors", "q.pt", "k.pt"], "the tensor q.pt cannot be read: No such file or directory"),
        (["causal", 64, "--picture", "no_such_folder/mask.png"], "there is no folder no_such_folder"),
    ],
)
def test_what_is_refused(stof, work, arguments, why):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    status, text, errors = stof("mask", *arguments)
    assert status == 1 and text == "" and errors.startswith("stof: ") and errors.count("\n") == 1 and why in errors


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
    assert stof("mask", "low_rank(k=2)", *options[:-4], "--head", 4, "--picture", picture)[0] == 1


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
