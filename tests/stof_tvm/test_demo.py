"""The demo, from the command line."""

import json

import pytest
import torch

from stof_tvm.cli import main
from stof_tvm.demo import demo_call, run_demo
from stof_tvm.errors import DeviceError
from tests.stof_tvm.cli import documented


@pytest.mark.slow  # builds, times and saves a four-layer BERT, and loads it in a fresh process
def test_demo_as_json(capfd):
    status = main(["demo", "--target", "llvm", "--json"])
    told = capfd.readouterr()
    assert status == 0, told.err
    result = json.loads(told.out)
    assert result["error"] < 1e-4 and result["fresh_process_error"] < 1e-4
    assert len(result["report"]["sites"]) == 4 and all(site["rewritten"] for site in result["report"]["sites"])
    assert result.keys() == documented.fields("demo")
    assert told.err == ""  # no progress in a pipe


def test_a_bad_target_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--target", "tpu"])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("usage: stof demo") and "'tpu' is not a target" in told.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_its_model_still_builds_for_one():
    with pytest.raises(DeviceError, match="no CUDA GPU here"):
        run_demo("cuda -arch=sm_90a")
    model, (ids,), _ = demo_call("cuda -arch=sm_90a")
    assert ids.device.type == "cpu" and next(model.parameters()).dtype == torch.float16
