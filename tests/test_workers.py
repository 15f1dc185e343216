"""The test run itself."""

import os
import subprocess
import sys

import pytest

POOL = """
import os, tvm
before = os.sched_getaffinity(0)
tvm.get_global_func("runtime.NumThreads")()
assert os.sched_getaffinity(0) == before, os.sched_getaffinity(0)
"""


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="of several workers only")
def test_a_worker_is_not_bound_to_one_core():
    """Its pool of one thread would be on the first core, as that of every other worker."""
    result = subprocess.run([sys.executable, "-c", POOL], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
