"""The thread pool, in fresh processes: it can only be sized once."""

import json
import os
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import json, os
before = os.sched_getaffinity(0)
import tvm
from tir_kernels.compiling.cpu_threads import use_all_cores
count = use_all_cores()
assert count == use_all_cores() == tvm.get_global_func("runtime.NumThreads")()
print(json.dumps([count, sorted(before), sorted(os.sched_getaffinity(0))]))
"""
SETTINGS = ("TVM_NUM_THREADS", "OMP_NUM_THREADS", "TVM_BIND_THREADS")

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")


def threads(command=(), **environment) -> int:
    """How many there are, in a process that may still run on all of its processors afterwards."""
    inherited = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    count, before, after = json.loads(done.stdout)
    assert after == before
    return count


def test_takes_every_physical_core_the_process_may_use():
    allowed = len(os.sched_getaffinity(0))
    assert threads() == min(allowed, psutil.cpu_count(logical=False) or allowed)


@pytest.mark.parametrize("name", ["TVM_NUM_THREADS", "OMP_NUM_THREADS"])
def test_obeys_a_number_of_threads(name):
    """And does not bind the only thread, and with it all that the process does, to the first processor."""
    assert threads(**{name: "1"}) == 1


def test_stays_on_the_processors_of_the_process():
    last = max(os.sched_getaffinity(0))
    assert threads((sys.executable, "-c", PINNED, str(last))) == 1


PINNED = """
import os, sys
os.sched_setaffinity(0, [int(sys.argv[1])])
os.execv(sys.argv[2], sys.argv[2:])
"""
