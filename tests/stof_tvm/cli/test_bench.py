"""`stof bench`: times of right results only."""

import pytest

from stof_tvm.cli import eager


def test_a_saved_engine(stof, work):
    status, found, errors = stof("bench", "encoder.stof", "--repeats", 5, "--json")
    (row,) = found["systems"]
    assert (status, errors, row["system"]) == (0, "", "stof")
    low, high = row["quartiles_ms"]
    assert 0 < min(row["samples_ms"]) <= low <= row["median_ms"] <= high <= max(row["samples_ms"])
    assert len(row["samples_ms"]) == 5 and row["first_ms"] > 0 and found["device"]


def test_a_model_beside_pytorch_with_the_same_mask(stof, work):
    arguments = ["bench", "my_models:encoder", "--mask", "sliding_window(8)", "--repeats", 3]
    status, text, errors = stof(*arguments)
    assert (status, errors) == (0, "")
    assert "eager / stof: " in text and "largest difference" in text and "not compared" not in text


def test_wrong_results_are_not_timed(stof, work, monkeypatch):
    monkeypatch.setattr(eager, "TOLERANCE", {})
    status, found, _ = stof("bench", "my_models:encoder", "--mask", "sliding_window(8)", "--json")
    assert (status, found["matches"], found["systems"]) == (1, False, []) and found["error"] > 0


def test_a_mask_that_pytorch_does_not_get_is_told(stof, work):
    status, found, _ = stof("bench", "my_models:masked_by_path", "--repeats", 2, "--json")
    assert (status, found["matches"], found["error"]) == (0, None, None) and "without the mask" in found["note"]
    assert [row["system"] for row in found["systems"]] == ["stof", "eager"]


@pytest.mark.parametrize(
    ("arguments", "why"), [(["missing.stof"], "no file"), (["encoder.stof", "--mask", "causal"], "has its own")]
)
def test_what_is_refused(stof, work, arguments, why):
    status, text, errors = stof("bench", *arguments)
    assert (status, text) == (1, "") and why in errors
