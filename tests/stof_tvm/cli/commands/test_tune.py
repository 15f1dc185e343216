"""`stof tune`: what it asks of the search, and what it says of the result.  tuning/test_tune.py searches for real."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from stof_tvm import masks
from stof_tvm.cli.commands.tune import _failures
from stof_tvm.tuning import tune as searching
from stof_tvm.tuning.search.state import Trial
from stof_tvm.tuning.tuning_report import TuningReport
from tests.stof_tvm.cli import documented

BEST = {"scheme": "0x4f", "us": 20.25, "default_us": 31.5}


HISTORY = (
    Trial(1, 0.5, "a", 31.5, "", False, 31.5),
    Trial(2, 0.6, "a", None, "it crashed the process", False, 31.5),
    Trial(3, 1.0, "b", 20.25, "", True, 20.25),
    Trial(4, 1.1, "b", None, "it took more than 20 s", False, 20.25),
    Trial(5, 1.2, "b", None, "it crashed the process", False, 20.25),
)


class Report:
    gpu, target = "a GPU", "llvm"

    def curve(self):
        return [(1, 0.5, 31.5), (3, 1.0, 20.25)]

    def to_dict(self):
        return {"best": BEST}

    def write(self, path):
        path.write_text("a page")


FAILED = "3 of 5 trials failed (2× it crashed the process)"


@pytest.fixture
def asked(monkeypatch):
    """The arguments of each search, which finds BEST at once."""
    calls = []

    def search(*arguments, **options):
        calls.append((arguments, options))
        return SimpleNamespace(report=Report(), best=BEST, is_interrupted=True, history=HISTORY)

    monkeypatch.setattr(searching, "tune", search)
    return calls


def test_the_search_gets_what_the_command_says(stof, work, asked, tmp_path):
    options = ["--target", "llvm", "--max-trials", 7, "--seconds", 2.5, "--seed", 3, "--mask", "causal"]
    status, text, errors = stof("tune", "my_models:encoder", *options, "--work-dir", tmp_path)
    assert (status, errors) == (0, "")
    assert text == f"20.2 µs, 31.5 µs by default; scheme 0x4f; {FAILED}; report: {tmp_path}/tuning_report.html\n"
    assert (tmp_path / "tuning_report.html").read_text() == "a page"
    (((_, target, (x,), mask), given),) = asked
    assert (target, x.shape, mask) == ("llvm", (1, 128, 16), masks.causal())
    assert (given["max_trials"], given["max_seconds"], given["seed"], given["progress"]) == (7, 2.5, 3, False)
    assert given["work_dir"] == str(tmp_path) and given["rpc_tracker"] is None


def test_no_failures():
    assert _failures(HISTORY[:1]) == "none of 1 trials failed"


def test_the_folder_is_named_as_build_names_it(stof, work, asked, tmp_path):
    assert stof("tune", "my_models:encoder", "--tuning-logs", tmp_path)[0] == 0
    assert asked[0][1]["work_dir"] == str(tmp_path)


def test_json(stof, work, asked, tmp_path):
    status, found, errors = stof("tune", "my_models:encoder", "--work-dir", tmp_path, "--json")
    assert (status, errors) == (0, "")
    assert {field.name for field in dataclasses.fields(TuningReport)} | found.keys() <= documented.fields("tune")
    assert found == {"best": BEST, "interrupted": True, "report": f"{tmp_path}/tuning_report.html"}


def test_the_search_is_drawn(stof, work, asked, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    file = tmp_path / "search.svg"
    assert stof("tune", "my_models:encoder", "--work-dir", tmp_path, "--picture", file)[0] == 0
    assert "<svg" in file.read_text()
    nowhere = tmp_path / "no_such_folder" / "search.svg"
    status, text, errors = stof("tune", "my_models:encoder", "--work-dir", tmp_path, "--picture", nowhere)
    assert status == 1 and text.startswith("20.2 µs") and "the picture cannot be written" in errors


def test_a_search_that_ended_before_all_kernels_had_a_time(stof, work, asked, tmp_path, monkeypatch):
    monkeypatch.setitem(BEST, "us", None)
    status, text, _ = stof("tune", "my_models:encoder", "--work-dir", tmp_path / "new")
    assert status == 0 and text.startswith("31.5 µs by default; it ended before all kernels had a time; scheme 0x4f;")
    assert (tmp_path / "new" / "tuning_report.html").exists()


def test_a_target_without_its_device(stof, work, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, text, errors = stof("tune", "my_models:encoder", "--target", "cuda -arch=sm_80", "--work-dir", tmp_path)
    assert (status, text) == (1, "") and errors.startswith("stof: there is no cuda device here")
    assert errors.count("\n") == 1
