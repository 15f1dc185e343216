"""The script of docs/parallel.md, as torchrun starts it: two processes on the CPU."""

import os
import re
import subprocess
import sys

import pytest

from tests.stof_tvm.parallel.launch import ROOT

PAGE = (ROOT / "docs" / "parallel.md").read_text()
SCRIPT = re.compile(r'^```python title="serve.py"\n(.*?)^```', re.S | re.M)


@pytest.mark.slow  # two processes, three engines in each
def test_the_script_runs_on_two_processes(tmp_path):
    parts = SCRIPT.findall(PAGE)
    assert len(parts) == 3 and "torchrun --nproc-per-node 2 serve.py" in PAGE
    (tmp_path / "serve.py").write_text("\n".join(parts))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TVM_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "serve.py"]
    run = subprocess.run(torchrun, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count("tensor parallel on 2 ranks: 1 of 1 attentions by heads, 1 MLPs") == 1


def test_no_example_of_the_page_is_a_fragment():
    assert "```text" not in PAGE
