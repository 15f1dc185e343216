"""The thread pool, in processes of its own: it can only be sized once."""

import json
import os
import subprocess
import sys

import psutil
import pytest

# One child for each object of settings, forked after TVM's import, which takes seconds and makes no pool.
PROGRAM = """
import json, os, sys
before = os.sched_getaffinity(0)
import tvm
from tir_kernels.compiling.cpu_threads import use_all_cores
for settings in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        os.environ.update(settings)
        count = use_all_cores()
        assert count == use_all_cores() == tvm.get_global_func("runtime.NumThreads")()
        print(json.dumps([count, sorted(before), sorted(os.sched_getaffinity(0))]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, settings
"""
SETTINGS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "TVM_BIND_THREADS")

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")


def threads(*settings, command=()) -> list[int]:
    """How many there are with each of the settings, in processes that may still run on all of their processors."""
    inherited = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM, json.dumps(settings)],
        env=inherited,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == len(settings) and all(after == before for _, before, after in told)
    return [count for count, *_ in told]


def test_takes_every_physical_core_the_process_may_use_or_obeys_a_number_of_threads():
    """And does not bind the only thread, and with it all that the process does, to the first processor."""
    allowed = len(os.sched_getaffinity(0))
    every = min(allowed, psutil.cpu_count(logical=False) or allowed)
    assert threads({}, {"TVM_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "1"}) == [every, 1, 1]


def test_stays_on_the_processors_of_the_process():
    last = max(os.sched_getaffinity(0))
    assert threads({}, command=(sys.executable, "-c", PINNED, str(last))) == [1]


PINNED = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
os.execv(sys.argv[2], sys.argv[2:])
"""
