"""Forks that work beside each other, and leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tir_kernels.compiling import forks
from tir_kernels.compiling.forks import Forks, cores

ORPHANS = """
import os, sys, time
from functools import partial
from pathlib import Path
from tir_kernels.compiling.forks import Forks

def work(path):
    path.write_text(str(os.getpid()))
    time.sleep(60)

paths = [Path(sys.argv[1], str(n)) for n in range(2)]
with Forks([partial(work, path) for path in paths], 2) as forks:
    while not all(path.exists() and path.read_text() for path in paths):
        time.sleep(0.01)
    print("ready", flush=True)
    time.sleep(60)
"""


def write(path: Path, text: str) -> None:
    path.write_text(f"{text} {os.getpid()}")


def end_by(what) -> None:
    if what == "raise":
        raise ValueError("it is told by its status alone")
    if what == "exit":
        sys.exit(0)
    os.kill(os.getpid(), what)


def is_gone(process: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def test_each_work_is_done_in_a_process_of_its_own(tmp_path):
    works = [partial(write, tmp_path / str(n), str(n)) for n in range(5)]
    with Forks(works, 2) as running:
        assert sorted(running.ended()) == [(n, 0) for n in range(5)]
    done = [(tmp_path / str(n)).read_text().split() for n in range(5)]
    assert [int(n) for n, _ in done] == list(range(5))
    assert len({process for _, process in done} | {str(os.getpid())}) == 6


def test_at_most_some_at_a_time(tmp_path):
    def work(number: int) -> None:
        (tmp_path / f"{number}.start").touch()
        time.sleep(0.05)
        running = len(list(tmp_path.glob("*.start"))) - len(list(tmp_path.glob("*.end")))
        (tmp_path / f"{number}.end").write_text(str(running))

    with Forks([partial(work, n) for n in range(6)], 1) as running:
        list(running.ended(3))
    assert max(int(path.read_text()) for path in tmp_path.glob("*.end")) <= 3


@pytest.mark.parametrize(("what", "status"), [("raise", 1), ("exit", 1), (signal.SIGKILL, -9), (signal.SIGTERM, -15)])
def test_the_status_tells_how_one_ended(what, status, capfd):
    with Forks([partial(end_by, what)], 2) as running:
        assert list(running.ended()) == [(0, status)]
    assert capfd.readouterr() == ("", "")


def test_what_is_unfinished_is_killed_with_what_it_has_started(tmp_path):
    def work() -> None:
        child = subprocess.Popen(["sleep", "60"])
        (tmp_path / "pids").write_text(f"{os.getpid()} {child.pid}")
        child.wait()

    with pytest.raises(KeyError), Forks([work], 1):
        while not (tmp_path / "pids").exists() or not (tmp_path / "pids").read_text():
            time.sleep(0.01)
        raise KeyError("an error of whoever waits")
    assert all(is_gone(int(process)) for process in (tmp_path / "pids").read_text().split())


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells a process of its parent's death")
def test_they_end_with_the_process_that_is_killed(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", ORPHANS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.kill()
    process.wait()
    process.stdout.close()
    assert all(is_gone(int((tmp_path / str(n)).read_text())) for n in range(2))


def test_work_is_left_where_the_system_starts_no_process(monkeypatch):
    def refuse():
        raise BlockingIOError("no more processes")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "fork", refuse)
    with Forks([partial(end_by, "raise")], 2) as running:
        assert list(running.ended()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(("quota", "count"), [("max 100000", 7), ("300000 100000", 3), ("50000 100000", 1)])
def test_cores_are_those_of_the_process_and_its_container(tmp_path, monkeypatch, quota, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(7)))
    monkeypatch.setattr(forks, "QUOTA", tmp_path / "cpu.max")
    assert cores() == 7
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cores() == count


AFTER_A_POOL = """
import sys
from pathlib import Path
import numpy as np, tvm
from tvm.script import tirx as T
from tir_kernels.compiling.forks import Forks

@T.prim_func(s_tir=True)
def double(x: T.Buffer((64,), "float32"), y: T.Buffer((64,), "float32")):
    for i in T.parallel(64):
        with T.sblock("double"):
            v = T.axis.spatial(64, i)
            y[v] = x[v] + x[v]

kernel = tvm.compile(double, target="llvm")
x, y = (tvm.runtime.tensor(np.full(64, n, "float32")) for n in (3, 0))
kernel(x, y)
assert tvm.get_global_func("runtime.NumThreads")() > 1

def work():
    kernel(y, x)
    Path(sys.argv[1]).write_text(str(x.numpy().sum()))

with Forks([work], 1) as forks:
    print(list(forks.ended()))
kernel(x, y)
"""


def test_parallel_loops_run_in_a_fork_of_a_process_with_a_pool(tmp_path):
    script, result = tmp_path / "script.py", tmp_path / "sum"
    script.write_text(AFTER_A_POOL)
    more = {"TVM_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, script, result], env=os.environ | more, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip() == b"[(0, 0)]", done.stderr.decode()
    assert float(result.read_text()) == 64 * 12
