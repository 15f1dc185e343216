"""`stof bench`: times of right results only."""

import pytest

from stof_tvm.cli.measuring import range_times, timing
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification import masking
from tests.stof_tvm.cli import documented


def test_a_saved_engine(stof, work):
    status, found, errors = stof("bench", "encoder.stof", "--repeats", 5, "--json")
    (row,) = found["systems"]
    assert (status, errors, row["system"]) == (0, "", "stof")
    low, high = row["quartiles_ms"]
    assert 0 < min(row["samples_ms"]) <= low <= row["median_ms"] <= high <= max(row["samples_ms"])
    assert len(row["samples_ms"]) == 5 and row["first_ms"] > 0 and found["device"]


@pytest.mark.parametrize(("model", "mask"), [("encoder", ["--mask", "sliding_window(8)"]), ("masked_by_path", [])])
def test_a_model_beside_pytorch_with_the_same_mask(stof, work, model, mask):
    status, text, errors = stof("bench", f"my_models:{model}", *mask, "--repeats", 3)
    assert (status, errors) == (0, "")
    assert "eager / stof: " in text and "compared with PyTorch: passed, largest difference" in text
    assert text.count(" … ") == 2  # quartiles


def test_wrong_results_are_not_timed(stof, work, monkeypatch):
    monkeypatch.setattr(SiteMasks, "__call__", lambda self, site: None)
    status, text, errors = stof("bench", "my_models:encoder", "--mask", "sliding_window(8)")
    assert (status, text) == (1, "") and "result is not PyTorch's" in errors and "self_attn" in errors


def test_a_mask_that_reaches_nothing_is_refused(stof, work):
    status, text, errors = stof("bench", "my_models:unattentive", "--mask", "causal")
    assert (status, text) == (1, "") and "reaches no attention" in errors


def test_a_mask_that_pytorch_cannot_be_given_is_told(stof, work, monkeypatch):
    monkeypatch.setattr(masking, "LARGEST_MASK", 100)
    status, found, _ = stof("bench", "my_models:masked_by_path", "--repeats", 2, "--json")
    assert status == 0 and "too large" in found["note"] and found["verification"]["result"] == "not verified"
    assert [row["system"] for row in found["systems"]] == ["stof"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["missing.stof"], "no file"),
        (["my_models:vector", "--lengths", "24:40"], "the second dimension of the inputs, and the first is (4,)"),
    ],
)
def test_what_fails(stof, work, arguments, why):
    status, text, errors = stof("bench", *arguments)
    assert (status, text) == (1, "") and errors.startswith("stof: ") and why in errors


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["my_models.py"], "neither 'demo' nor module:function nor path/file.py:function"),
        (["encoder.stof", "--mask", "causal"], "has its own"),
        (["encoder.stof", "--lengths", "24:40"], "a saved engine has one shape"),
        (["my_models:encoder", "--lazy"], "--lazy is for --lengths"),
    ],
)
def test_wrong_usage(stof, work, arguments, why):
    status, text, errors = stof("bench", *arguments)
    assert (status, text) == (2, "") and errors.startswith("usage: stof bench") and why in errors.splitlines()[-1]


def test_times_that_scatter_are_told():
    from stof_tvm.cli.commands.bench import _text

    row = {"system": "stof", "first_ms": 1.0, "median_ms": 1.0, "quartiles_ms": [0.9, 1.1]}
    for high, is_wide in ((2.0, False), (20.0, True)):
        eager = {**row, "system": "eager", "quartiles_ms": [1.5, high]}
        found = {"systems": [row, eager], "device": "this", "verification": None, "note": None, "busy": None}
        assert ("the times of eager scatter" in _text(found)) == is_wide


@pytest.mark.slow
def test_an_engine_of_a_range_is_timed_at_each_length(stof, work, monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    target = "--target", '{"kind": "llvm", "opt-level": 0}'
    status, found, errors = stof("bench", "my_models:encoder", "--lengths", "24,40", "--repeats", 4, *target, "--json")
    assert (status, errors) == (0, "") and found.keys() <= documented.fields("bench")
    assert found["range"] == [24, 40] and found["mode"] in ("ahead", "lazy")
    assert [(row["length"], row["system"]) for row in found["lengths"]] == [
        *((24, "stof"), (24, "eager"), (40, "stof"), (40, "eager"))
    ]
    for row in found["lengths"]:
        assert len(row["samples_ms"]) == 4 and row["first_ms"] > 0
        assert row["median_ms"] <= row["p99_ms"] <= max(row["samples_ms"])
    lines = range_times.text(found)
    assert lines[0].endswith(f"24 to 40, {found['mode']}") and [line.split()[0] for line in lines[2:4]] == ["24", "40"]
    assert lines[-1].startswith("first call over median: ")


@pytest.mark.parametrize("text", ["128", "128:", "300:200", "5:5", "1:2:3:4", "a:b", "0:8", "7,7"])
def test_no_lengths(stof, work, text):
    status, _, errors = stof("bench", "my_models:encoder", "--lengths", text)
    assert status == 2 and "--lengths" in errors


@pytest.mark.parametrize("command", [["bench"], ["build", "x.stof"], ["tune"]])
@pytest.mark.parametrize(
    ("option", "given", "why"),
    [
        ("--mask", "sliding_window(", "'sliding_window(' cannot be read"),
        ("--mask", "sparge", "'sparge' is a rule of stof_tvm.masks.runtime, which finds its blocks in each call: give "
         '--mask a .json file, in which rules are {"rule": TEXT}'),
        ("--mask", "xatention", "did you mean 'xattention'? That is a rule"),
        ("--target", "lvm", 'did you mean "llvm"?'),
    ],
)  # fmt: skip
def test_what_is_no_mask_or_target_is_told_before_the_model_is_loaded(stof, work, command, option, given, why):
    name, *file = command
    status, text, errors = stof(name, "no_such_module:f", *file, option, given)
    assert (status, text) == (2, "") and errors.startswith(f"usage: stof {name}") and why in errors.splitlines()[-1]
