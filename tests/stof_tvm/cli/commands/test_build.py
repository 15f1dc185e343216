"""`stof build`: a file that loads, and the report."""

import json

import pytest
import torch

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


def test_the_engine_computes_the_masked_model(work):
    import my_models

    model, (x,) = my_models.encoder()
    masked = ~stof_tvm.masks.sliding_window(8).dense(128)
    with torch.no_grad():
        torch.testing.assert_close(stof_tvm.load("encoder.stof")(x), model(x, src_mask=masked), atol=1e-4, rtol=1e-4)


def test_json_and_text(stof, work, tmp_path):
    # The same model, with a scheme of its own.
    scheme = stof_tvm.load("encoder.stof").report().fusion_scheme
    options = ["--target", "llvm", "--fusion-scheme", scheme, "--no-tuning-logs", "--strict"]
    options += ["--float32", "tf32"]  # without effect on a CPU
    file = tmp_path / "again.stof"
    status, found, errors = stof("build", "my_models:masked_by_path", file, *options, "--json")
    assert (status, errors, found["file"], found["bytes"]) == (0, "", str(file), file.stat().st_size)
    assert found["report"]["float32"] == "ieee"
    assert found["report"]["fusion_scheme"] == scheme and found["build_seconds"] > 0 and found["save_seconds"] > 0
    assert [site["mask"] for site in found["report"]["sites"]] == ["sliding_window(8)"]


RULES = {"format": "stof_tvm masks 1", "masks": {"self_attn": [{"rule": "top_blocks(1, block=32)"}, "causal()"]}}


def test_a_file_with_rules(stof, work, tmp_path):
    """`build` saves an engine that has them, and `bench` times one alone."""
    import my_models

    (tmp_path / "rules.json").write_text(json.dumps(RULES))
    file = tmp_path / "ruled.stof"
    options = ["--mask", tmp_path / "rules.json", "--target", str(QUICK_LLVM), "--json"]
    status, found, errors = stof("build", "my_models:encoder", file, *options)
    assert (status, errors) == (0, "") and found["report"]["verification"]["result"] == "passed"
    (site,) = found["report"]["sites"]
    assert site["rule"].startswith("per_head([top_blocks(1, block=32), causal()])")
    x = my_models.encoder()[1][0].flip(1)
    rule = stof_tvm.masks.runtime.per_head([stof_tvm.masks.runtime.top_blocks(1, block=32), stof_tvm.masks.causal()])
    expected = stof_tvm.build(my_models.encoder()[0], QUICK_LLVM, (x,), mask={"self_attn": rule}, verify=False)(x)
    torch.testing.assert_close(stof_tvm.load(file)(x), expected, atol=1e-6, rtol=0)
    status, found, errors = stof("bench", "my_models:encoder", "--repeats", 2, *options)
    assert (status, errors) == (0, "") and [row["system"] for row in found["systems"]] == ["stof"]
    assert "eager PyTorch is not timed: per_head([top_blocks(1" in found["note"]


@pytest.mark.parametrize(
    ("entry", "why"), [({"rule": "top_blcks(1)"}, "did you mean 'top_blocks'?"), ("sparge", "write {"), ({}, "a list")]
)
def test_a_file_with_what_is_no_rule(stof, work, tmp_path, entry, why):
    (tmp_path / "rules.json").write_text(json.dumps(RULES | {"masks": {"self_attn": [entry]}}))
    status, text, errors = stof("build", "my_models:missing", tmp_path / "x.stof", "--mask", tmp_path / "rules.json")
    assert (status, text) == (1, "") and errors.count("\n") == 1 and "rules.json: " in errors and why in errors


def test_a_program_of_a_range(stof, work, tmp_path):
    path = tmp_path / "range.stof"
    status, text, errors = stof("build", "my_models:any_batch", path)
    assert (status, errors) == (0, "") and "a range of shapes: " in text
    status, told, errors = stof("report", path)
    assert (status, errors) == (0, "") and str(stof_tvm.load(path).report()) in told
    status, told, errors = stof("bench", path)
    assert (status, told) == (2, "") and "holds an engine for a range of shapes" in errors


def test_a_range_of_lengths(stof, work, tmp_path):
    path = tmp_path / "range.stof"
    arguments = ("--lengths", "8:48", "--mask", "sliding_window(8)")
    status, text, errors = stof("build", "my_models:encoder", path, *arguments)
    assert (status, errors) == (0, "") and "a range of shapes: src (1, 8 to 48, 16)" in text
    engine = stof_tvm.load(path)
    for length in (8, 33, 48):
        assert engine(torch.randn(1, length, 16)).shape == (1, length, 16)


@pytest.mark.parametrize("text", ["48", "8,48", "48:8", "8:48:3"])
def test_what_is_no_range_of_lengths(stof, work, text):
    status, out, errors = stof("build", "my_models:encoder", "x.stof", "--lengths", text)
    assert (status, out) == (2, "") and text in errors


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["my_models:missing", "x.stof"], "cannot be loaded"),
        (["my_models:any_batch", "x.stof", "--lengths", "8:48"], "--lengths needs a torch.nn.Module"),
        (["my_models:vector", "x.stof", "--lengths", "8:48"], "--lengths"),
        (["my_models:encoder", "x.stof", "--tuning-logs", "no_such_folder"], "is no folder"),
        # Told before the model is loaded, which may take minutes to build.
        (["my_models:missing", "no_such_folder/x.stof"], "there is no folder no_such_folder"),
        (["my_models:missing", "."], ". is a folder; name a file in it"),
    ],
)
def test_what_is_refused(stof, work, arguments, why):
    status, text, errors = stof("build", *arguments)
    assert status == 1 and text == "" and errors.count("\n") == 1 and why in errors
    assert not (work / "x.stof").exists()


def test_a_target_that_is_none(stof, work):
    status, text, errors = stof("build", "my_models:encoder", "x.stof", "--target", "tpu")
    assert (status, text) == (2, "") and "'tpu' is not a target" in errors and not (work / "x.stof").exists()


def test_a_folder_that_cannot_be_written_is_told_first(stof, work, monkeypatch, tmp_path):
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    status, text, errors = stof("build", "my_models:missing", tmp_path / "x.stof")
    assert (status, text) == (1, "") and f"the folder {tmp_path} is read-only" in errors
