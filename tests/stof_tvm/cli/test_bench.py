"""`stof bench`: times of right results only."""

import pytest

from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification import masking


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
        (["my_models.py"], "neither 'demo' nor module:function nor path/file.py:function"),
        (["encoder.stof", "--mask", "causal"], "has its own"),
    ],
)
def test_what_is_refused(stof, work, arguments, why):
    status, text, errors = stof("bench", *arguments)
    assert (status, text) == (1, "") and why in errors


def test_times_that_scatter_are_told():
    from stof_tvm.cli.bench import _text

    row = {"system": "stof", "first_ms": 1.0, "median_ms": 1.0, "quartiles_ms": [0.9, 1.1]}
    for high, is_wide in ((2.0, False), (20.0, True)):
        eager = {**row, "system": "eager", "quartiles_ms": [1.5, high]}
        found = {"systems": [row, eager], "device": "this", "verification": None, "note": None}
        assert ("the times of eager scatter" in _text(found)) == is_wide
