"""Work in a copy of the process, which may end there."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch  # noqa: F401  whose state says whether there is a GPU in use

from tir_kernels.compiling.forked import in_a_copy


def test_files_are_written_and_nothing_else_changes(tmp_path):
    done = []

    def work():
        done.append(True)
        (tmp_path / "a.txt").write_text("written")
        os.write(2, b"one\ntwo\n")

    assert in_a_copy(work) == [b"one\n", b"two\n"]
    assert (tmp_path / "a.txt").read_text() == "written" and done == []


def test_a_process_that_uses_a_gpu_is_not_copied(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.delattr("os.fork")
    done = []
    assert in_a_copy(lambda: done.append(os.getpid())) == [] and done == [os.getpid()]


def fail():
    raise ValueError("no linker ä")


def end():
    os.write(2, b"LLVM ERROR: disk full\n")
    os._exit(1)


@pytest.mark.parametrize(
    ("work", "why"),
    [
        (fail, "no linker ä"),
        (end, "LLVM ERROR: disk full"),
        (lambda: os.kill(os.getpid(), 9), "ended with status -9"),
        (lambda: sys.exit(3), "ended with status 1"),
    ],
)
def test_what_fails_is_told(work, why, capfd):
    with pytest.raises(RuntimeError, match=why):
        in_a_copy(work)
    assert capfd.readouterr().err == ""


def test_much_that_is_said_does_not_block():
    assert len(in_a_copy(lambda: os.write(2, b"x\n" * 500_000) and None)) == 500_000


def test_exit_waits_for_no_one(tmp_path):
    """LLVM calls exit() where a disk is full; its handlers wait for threads of the process that was forked.

    So does what the thread has of its own: TVM's pool of threads, once a kernel has run.
    """
    program = """
import ctypes, os
import numpy as np, tvm
from tvm.script import tirx as T
from tir_kernels.compiling.forked import in_a_copy
@T.prim_func(s_tir=True)
def fill(x: T.Buffer((64,), "float32")):
    for i in T.parallel(64):
        x[i] = T.float32(1)
os.environ["TVM_NUM_THREADS"] = "2"
x = tvm.runtime.tensor(np.zeros(64, "float32"))
tvm.compile(tvm.IRModule({"main": fill.with_attr("global_symbol", "main")}), target="llvm")["main"](x)
assert x.numpy().all()
libc = ctypes.CDLL(None)
libc.on_exit(libc.pause, None)
try:
    in_a_copy(lambda: libc.exit(7))
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""
    (tmp_path / "program.py").write_text(program)  # TVMScript reads its source
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert ended.stdout == "a process ended with status 1\n", ended.stderr


def test_work_of_a_thread():
    """One that has nothing yet which ends with it."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_a_copy, lambda: os.write(2, b"one\n") and None).result() == [b"one\n"]
    program = """
from concurrent.futures import ThreadPoolExecutor
from tir_kernels.compiling.forked import in_a_copy
assert in_a_copy(lambda: None) == []
with ThreadPoolExecutor(1) as pool:
    assert pool.submit(in_a_copy, lambda: None).result() == []
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=100, env=environment)
