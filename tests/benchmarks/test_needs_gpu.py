"""Scripts that measure on a GPU say so where there is none."""

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from benchmarks.needs_gpu import need_gpu

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_fusion.py"


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_gpu_there_is_one_line(no_gpu, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu_fusion.py"])
    with pytest.raises(SystemExit) as stop:
        need_gpu(Namespace(dry_run=False, merge=None))
    assert stop.value.code == 2
    told = "gpu_fusion.py: there is no CUDA GPU here: --dry-run goes through every case on the CPU\n"
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("options", [{"dry_run": True}, {"merge": ["rows.json"]}, {"dry_run": False, "worker": 0}])
def test_what_needs_no_gpu_goes_on(no_gpu, options):
    need_gpu(Namespace(**options))


@pytest.mark.slow  # a process that imports PyTorch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_script_ends_so():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("gpu_fusion.py: there is no CUDA GPU here")
