"""The thread pool, in fresh processes: it can only be sized once."""

import os
import subprocess
import sys

import psutil
import pytest

PROGRAM = """
import tvm
from tir_kernels.attention.cpu_threads import use_all_cores
count = use_all_cores()
assert count == use_all_cores() == tvm.get_global_func("runtime.NumThreads")()
print(count)
"""


def threads(**environment):
    inherited = {k: v for k, v in os.environ.items() if k not in ("TVM_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=inherited | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no CPU affinity")
def test_takes_every_physical_core_the_process_may_use():
    allowed = len(os.sched_getaffinity(0))
    assert threads() == min(allowed, psutil.cpu_count(logical=False) or allowed)


def test_obeys_tvm_num_threads():
    assert threads(TVM_NUM_THREADS="1") == 1
