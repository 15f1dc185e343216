"""Ctrl-C ends a search within two seconds, whatever it is doing."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIES = 20
SECONDS = 2.0
MODEL = """
import torch

def encoder():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(d_model=32, nhead=2, dim_feedforward=64, batch_first=True).eval()
    return layer, (torch.randn(1, 32, 32),)
"""


@pytest.mark.skipif(os.environ.get("STOF_ROBUSTNESS") != "long", reason="minutes, and a machine of its own: make fuzz")
def test_a_search_ends_when_it_is_interrupted(tmp_path):
    (tmp_path / "searched.py").write_text(MODEL)
    rng = random.Random(0)
    for number in range(TRIES):
        command = [sys.executable, "-m", "stof_tvm.cli", "tune", "searched.py:encoder", "--target", "cpu"]
        command += ["--work-dir", str(tmp_path / f"logs{number}")]
        with open(tmp_path / "told", "w+") as told:
            search = subprocess.Popen(
                command, cwd=tmp_path, stdout=told, stderr=told, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )
            # Python's own imports are over, and the search is anywhere between its beginning and many trials.
            _wait_for_children(search, patience=120)
            time.sleep(rng.random() * 12)
            running = search.poll() is None
            search.send_signal(signal.SIGINT)
            started = time.monotonic()
            try:
                search.wait(60)
            finally:
                search.kill()
            seconds = time.monotonic() - started
            told.seek(0)
            text = told.read()
        # CPython ends by the signal itself where it came during exec of a text.
        assert not running or search.returncode in (0, 130, -signal.SIGINT), text
        assert seconds < SECONDS + _slowness(), text


def _wait_for_children(process, patience: float) -> None:
    """Until the search has started the processes that compile and measure."""
    deadline = time.monotonic() + patience
    tasks = Path(f"/proc/{process.pid}/task")
    while process.poll() is None and time.monotonic() < deadline:
        if any(file.read_text().split() for file in tasks.glob("*/children")):
            return
        time.sleep(0.02)


def _slowness() -> float:
    """Seconds that a busy machine adds."""
    return max(0.0, 2 * os.getloadavg()[0] / (os.cpu_count() or 1) - 2)
