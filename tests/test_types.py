"""What a type checker says to a user's program."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = """
import torch

import stof_tvm
from stof_tvm import masks

model = torch.nn.Linear(4, 4)
engine = stof_tvm.build(model, "cpu", (torch.ones(2, 4),), mask=masks.causal(), strict=True, verify=False)
engine.report().sites
stof_tvm.load("model.stof").save("other.stof")
stof_tvm.tune(model, example_inputs=(torch.ones(2, 4),), max_trials=4)
"""
CONFIG = """
[mypy]
[mypy-tvm.*,tvm_ffi.*,torch.*,transformers.*,matplotlib.*,xgboost.*,tqdm.*,cuda.*,psutil.*,cloudpickle.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """From lines to mypy's complaints about a program that ends with them."""
    pytest.importorskip("mypy", reason="mypy is a tool of development")
    folder = tmp_path_factory.mktemp("typed")
    (folder / "mypy.ini").write_text(CONFIG)

    def check(lines: str) -> list[str]:
        (folder / "program.py").write_text(PROGRAM + lines)
        command = [sys.executable, "-m", "mypy", "--config-file", str(folder / "mypy.ini")]
        command += ["--cache-dir", str(folder / "cache"), str(folder / "program.py")]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"MYPYPATH": str(ROOT), "PATH": ""})
        return [line for line in run.stdout.splitlines() if "program.py" in line and ": error:" in line]

    return check


@pytest.mark.slow
def test_a_checker_sees_signatures(checked):
    wrong = (
        ('stof_tvm.build(model, "cpu", strickt=True)\n', "strickt"),
        ("stof_tvm.biuld(model)\n", "biuld"),
        ("stof_tvm.build(model, strict='yes')\n", "incompatible type"),
        ("engine.sav()\n", "sav"),
        ("stof_tvm.tune(model, trials=3)\n", "trials"),
    )
    found = checked("".join(line for line, _ in wrong))
    assert len(found) == len(wrong)
    assert all(name in complaint for complaint, (_, name) in zip(found, wrong))


@pytest.mark.slow
def test_a_checker_knows_what_the_kernel_and_masks_give(checked):
    q = "stof_tvm.sparse_attention(x, x, x"
    right = f"""
x = torch.ones(1, 2, 8, 8)
out: torch.Tensor = {q})
out, lse = {q}, masks.causal(), return_lse=True)
either = {q}, return_lse=bool(out), kernel="row-wise")
mask: masks.Mask = masks.causal() & x | ~masks.strided(2)
mask = x & mask | (lambda b, h, i, j: i >= j)
{q}, mask & (lambda b, h, i, j: i >= j))
"""
    assert checked(right) == []
    wrong = (
        f"{q}, kernel='row')\n",
        f"a, b, c = {q}, return_lse=True)\n",
    )
    found = checked("x = torch.ones(1, 2, 8, 8)\n" + "".join(wrong))
    assert len(found) == 2 and "overload" in found[0] and "2 values" in found[1]


def test_the_names_for_checkers_are_those_there_are():
    import stof_tvm

    text = (ROOT / "stof_tvm" / "__init__.py").read_text()
    assert set(stof_tvm._MODULE_OF) == {
        line.rpartition(" as ")[2] for line in text.splitlines() if " import " in line and " as " in line
    }
