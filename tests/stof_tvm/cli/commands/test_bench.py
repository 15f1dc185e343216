"""`stof bench`: times of right results only."""

import pytest
import torch
from torch.export import Dim

import stof_tvm
from stof_tvm.cli.measuring import range_times, timing
from stof_tvm.cli.measuring.other_load import OtherLoad
from stof_tvm.cli.measuring.ratio import UNSURE
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification import masking
from tests.models.quick_llvm import QUICK_LLVM
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
    assert text.count(" … ") == 3  # quartiles, of the ratio as well


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
        (["encoder.stof", "--lengths", "24:40"], "encoder.stof holds an engine of one shape"),
        (["my_models:encoder", "--lazy"], "--lazy is for --lengths"),
    ],
)
def test_wrong_usage(stof, work, arguments, why):
    status, text, errors = stof("bench", *arguments)
    assert (status, text) == (2, "") and errors.startswith("usage: stof bench") and why in errors.splitlines()[-1]


@pytest.mark.parametrize(("factors", "is_sure"), [((1, 1, 1), True), ((1, 9, 90), False)])
def test_times_that_scatter_are_told(stof, work, monkeypatch, factors, is_sure):
    """The times of the rounds are replaced: what a machine does meanwhile is no matter of a test."""
    times = iter([2.0, 3.0, *(x for factor in factors for x in (1.0, 2.0 * factor))])  # warmed up, then in turns
    monkeypatch.setattr(timing, "_warm_up", lambda call, device: next(times))
    monkeypatch.setattr(timing, "_wall_ms", lambda call: next(times))
    monkeypatch.setattr(OtherLoad, "note", lambda self, threads: None)
    status, text, errors = stof("bench", "my_models:encoder", "--repeats", len(factors))
    (line,) = [line for line in text.splitlines() if line.startswith("eager / stof: ")]
    assert (status, errors) == (0, "")
    assert line == (
        "eager / stof: 2.00, in half of the rounds 2.00 … 2.00"
        if is_sure
        else f"eager / stof: {UNSURE}: in half of the rounds 10.00 … 99.00; do not quote it"
    )


def test_a_busy_machine_is_told_with_the_ratio(stof, work, monkeypatch):
    monkeypatch.setattr(OtherLoad, "note", lambda self, threads: "other processes kept it busy")
    _, found, _ = stof("bench", "my_models:encoder", "--repeats", 2, "--json")
    assert found["busy"] == "other processes kept it busy" and not found["ratio"]["is_sure"]
    assert found.keys() <= documented.fields("bench") and found["ratio"].keys() <= documented.fields("bench")


@pytest.mark.slow
def test_an_engine_of_a_range_is_timed_at_each_length(stof, work, monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(OtherLoad, "note", lambda self, threads: "it was busy")
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
    assert [row["ratio"] and row["ratio"]["is_sure"] for row in found["lengths"]] == [None, False] * 2
    lines = range_times.text(found)
    assert lines[0].endswith(f"24 to 40, {found['mode']}") and [line.split()[0] for line in lines[2:4]] == ["24", "40"]
    assert lines[-1].startswith("first call over median: ")


class OfAnyLength(torch.nn.Module):
    def forward(self, x, y):
        return x * 2 + y


def test_a_saved_range_is_timed_at_each_length(stof, tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_SECONDS", 0.0)
    sizes = {0: Dim("batch", max=2), 1: Dim("length", max=64)}
    example = torch.ones(2, 24, 3), torch.ones(2, 24, 1, dtype=torch.int64)
    engine = stof_tvm.build(OfAnyLength(), QUICK_LLVM, example, dynamic_shapes=(sizes, sizes), buckets={"batch": [2]})
    engine.save(tmp_path / "range.stof")
    name = str(tmp_path / "range.stof")
    status, found, errors = stof("bench", name, "--lengths", "24,1,40", "--repeats", 2, "--json")
    assert (status, errors) == (0, "") and found.keys() <= documented.fields("bench")
    assert [(row["length"], row["system"]) for row in found["lengths"]] == [(n, "stof") for n in (24, 1, 40)]
    assert stof("bench", name, "--lengths", "24,40", "--repeats", 2)[0] == 0
    status, text, errors = stof("bench", name, "--lengths", "24,65")
    assert (status, text) == (1, "") and "x dimension 1 is 65; it must be 1 to 64" in errors
    for more, why in (([], "--lengths A,B,C tells which to time"), (["--lengths", "2,3", "--lazy"], "is compiled")):
        status, text, errors = stof("bench", name, *more)
        assert (status, text) == (2, "") and why in errors


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
