"""TVM's thread pool on every core: by itself it takes half of the processors, for it counts on hyper-threads."""

import functools
import os

import psutil
import tvm

SHARE_CORES = -3  # TVM's affinity mode "specify threads that share all of the listed cores"


@functools.cache
def use_all_cores() -> int:
    """Let TVM's parallel loops run on all physical cores this process may use; returns how many that are.

    Call it before the first kernel runs: the pool of a thread never grows.  Does nothing where TVM_NUM_THREADS or
    OMP_NUM_THREADS is set, which TVM obeys.
    """
    if not {"TVM_NUM_THREADS", "OMP_NUM_THREADS"} & os.environ.keys():
        allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
        cores = min(len(allowed), psutil.cpu_count(logical=False) or len(allowed))
        if cores > 1:
            tvm.get_global_func("runtime.config_threadpool")(SHARE_CORES, cores, [str(cpu) for cpu in allowed])
    return tvm.get_global_func("runtime.NumThreads")()
