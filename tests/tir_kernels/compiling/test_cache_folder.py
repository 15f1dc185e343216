import os
import pwd
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from tir_kernels.compiling import cache_folder
from tir_kernels.compiling.cache_folder import cache_dir

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch, tmp_path):
    for name in ("STOF_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    cache_folder._default.cache_clear()
    yield
    cache_folder._default.cache_clear()


def without_warning() -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return cache_dir()


def test_what_is_given(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert without_warning() == tmp_path / ".cache" / "stof_tvm"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert without_warning() == tmp_path / "xdg" / "stof_tvm"
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path / "given"))
    assert without_warning() == tmp_path / "given"


def nobody(_):
    raise KeyError("getpwuid(): uid not found")


def test_a_user_without_a_home(monkeypatch, tmp_path):
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    with pytest.warns(UserWarning, match="STOF_CACHE_DIR") as told:
        folder = cache_dir()
    assert len(told) == 1 and folder == tmp_path / "tmp" / f"stof_tvm-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert without_warning() == folder


def test_a_home_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "home").write_text("no folder")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with pytest.warns(UserWarning, match="home"):
        assert cache_dir().parent == tmp_path / "tmp"


@pytest.mark.parametrize("planted", ["open to others", "another user's", "a link"])
def test_a_folder_that_others_can_write_is_not_taken(monkeypatch, tmp_path, planted):
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    predictable = tmp_path / "tmp" / f"stof_tvm-{os.getuid()}"
    if planted == "a link":
        predictable.symlink_to(tmp_path)
    else:
        predictable.mkdir()
        predictable.chmod(0o777 if planted == "open to others" else 0o700)
    if planted == "another user's":
        user = os.getuid()
        predictable.rename(tmp_path / "tmp" / f"stof_tvm-{user + 1}")
        monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.warns(UserWarning):
        folder = cache_dir()
    assert folder.parent == tmp_path / "tmp" and not folder.is_symlink()
    assert folder.name not in (predictable.name, f"stof_tvm-{os.getuid()}")


# On the path of Python, so that processes which those start have no entry either.
NO_ENTRY = """
import pwd

def nobody(_):
    raise KeyError("getpwuid(): uid not found")

pwd.getpwuid = nobody
"""

KERNEL = """
import torch, stof_tvm
import stof_tvm.compiler
q = torch.randn(1, 1, 16, 8)
for mask in (stof_tvm.masks.causal(), stof_tvm.masks.sliding_window(2)):
    out = stof_tvm.sparse_attention(q, q, q, mask)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, q, mask.dense(16)))
"""

WORKER = """
from stof_tvm.tuning.measuring.process import start_process
from tvm.support.popen_pool import PopenWorker
worker = PopenWorker(exec, (start_process(),))
worker.send(abs, (-7,), timeout=60)
assert worker.recv() == 7
"""


@pytest.fixture
def nobodys_python(tmp_path):
    """Runs lines of Python as a user with neither a home nor an entry in the password file."""

    def run(lines: str) -> str:
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}:{ROOT}", "TMPDIR": str(tmp_path)}
        command = [sys.executable, "-c", lines]
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stderr

    (tmp_path / "sitecustomize.py").write_text(NO_ENTRY)
    return run


@pytest.mark.slow  # starts Python
def test_an_arbitrary_user_of_a_container(nobodys_python, tmp_path):
    told = nobodys_python(KERNEL)
    assert told.count("UserWarning:") == 1 and "STOF_CACHE_DIR" in told
    assert len(list((tmp_path / f"stof_tvm-{os.getuid()}" / "stof_tvm").glob("*.so"))) >= 1


@pytest.mark.slow  # starts Python
@pytest.mark.parametrize("door", ["stof_tvm", "relax_passes.pipeline", "tir_kernels.target", "stof_tvm.cli.table"])
def test_what_imports_tvm_first(nobodys_python, door):
    assert nobodys_python(f"import {door}, tvm, os; assert 'HOME' not in os.environ") == ""


@pytest.mark.slow  # starts Python
def test_processes_of_the_search_import_tvm_before_anything_of_ours(nobodys_python):
    nobodys_python(WORKER)
