"""`stof build`: a file that loads, and the report."""

import pytest
import torch

import stof_tvm


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
    assert found["report"]["fusion_scheme"] == scheme and found["build_seconds"] > 0
    assert [site["mask"] for site in found["report"]["sites"]] == ["sliding_window(8)"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["my_models:missing", "x.stof"], "cannot be loaded"),
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
