"""The load of other processes while calls are timed."""

import os
import subprocess
import sys
import time

import pytest

from stof_tvm.cli.measuring import other_load
from stof_tvm.cli.measuring.other_load import OtherLoad


@pytest.fixture
def machine(monkeypatch):
    """A function that measures on a machine of two cores: seconds of all processes, of this one, and of the clock."""

    def measured(busy, own, wall):
        clocks = {"_busy_seconds": [0.0, busy], "_own_seconds": [0.0, own]}
        for name, values in clocks.items():
            monkeypatch.setattr(other_load, name, lambda values=values: values.pop(0))
        walls = [0.0, wall]
        monkeypatch.setattr(other_load.time, "perf_counter", lambda: walls.pop(0))
        monkeypatch.setattr(other_load.os, "sched_getaffinity", lambda _: {0, 1})
        monkeypatch.setattr(other_load.os, "cpu_count", lambda: 2)
        with OtherLoad() as load:
            pass
        return load

    return measured


def test_others_are_what_this_process_did_not_use(machine):
    load = machine(busy=20.0, own=7.0, wall=10.0)
    assert load.cores == 1.3
    assert "other processes kept 1.3 of 2 cores busy" in load.note(2)


@pytest.mark.parametrize(
    ("busy", "threads", "is_busy"), [(0.2, 2, False), (0.5, 2, True), (0.9, 1, False), (1.5, 1, True)]
)
def test_a_note_where_threads_must_wait(machine, busy, threads, is_busy):
    load = machine(busy=10 * busy + 5.0, own=5.0, wall=10.0)
    assert (load.note(threads) is not None) == is_busy


def test_a_system_that_tells_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(other_load, "STAT", tmp_path / "none")
    with OtherLoad() as load:
        pass
    assert load.cores is None and load.note(64) is None


@pytest.mark.skipif(not other_load.STAT.exists(), reason="needs Linux")
def test_a_process_beside_is_seen():
    """A process that computes is seen; what this one computes is not, but for what others do here meanwhile."""
    beside = subprocess.Popen([sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"], stdout=subprocess.PIPE)
    try:
        beside.stdout.readline()
        used = lambda: sum(map(int, open(f"/proc/{beside.pid}/stat").read().rpartition(")")[2].split()[11:13]))
        before = used()
        with OtherLoad() as load:
            time.sleep(1.0)
        theirs = (used() - before) / os.sysconf("SC_CLK_TCK")
    finally:
        beside.kill()
        beside.wait()
        beside.stdout.close()
    assert load.cores >= 0.7 * theirs > 0
