"""TVM's thread pool on all the cores that the process may use.

By default TVM assumes hyper-threads, takes half of the processors, and binds each thread to one of the first
processors, whatever other processes do there.  The calling thread is bound, too: with a pool of one thread, everything
this process does would run on the first processor.
"""

import functools
import os
from collections.abc import Sequence

import psutil
import tvm

SHARE_CORES = -3  # TVM's affinity mode "specify threads that share all of the listed cores"


@functools.cache
def use_all_cores() -> int:
    """Let TVM's parallel loops run on all physical cores this process may use; returns the number of threads.

    Call it before the first kernel runs: the pool of a thread never grows.  TVM_NUM_THREADS or OMP_NUM_THREADS, where
    set, decides the number of threads instead.
    """
    # Read before the pool exists: the pool may bind this thread to one core.
    allowed = _allowed()
    threads = tvm.get_global_func("runtime.NumThreads")
    if {"TVM_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        count = threads()
    else:
        count = min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))
    _configure(count, allowed)
    return threads()


def use_own_thread() -> None:
    """Let TVM's parallel loops run on the calling thread alone, in a fork of a process that may have had a pool.

    A fork has its parent's pool, but none of its threads: a parallel loop would wait for them for ever.
    """
    _configure(1, _allowed())


def _configure(count: int, allowed: Sequence[int]) -> None:
    tvm.get_global_func("runtime.config_threadpool")(SHARE_CORES, count, [str(cpu) for cpu in allowed])


def _allowed() -> Sequence[int]:
    """The processors that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
