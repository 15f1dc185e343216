"""Measuring on other machines, through TVM's RPC tracker and MetaSchedule's runner."""

import numpy as np
import tvm
from tvm.s_tir.meta_schedule.runner import EvaluatorConfig, RPCConfig, RPCRunner

from tir_kernels.errors import InputError

SESSION_SECONDS = 60
TIMES = EvaluatorConfig(number=3, repeat=5, min_repeat_ms=5, enable_cpu_cache_flush=False)
RANDOM_FILL = "tvm.contrib.random.random_fill_for_measure"


def rpc_runner(tracker: str, key: str, workers: int) -> RPCRunner:
    """The runner for the devices that a tracker has under a key, `workers` at a time.  It compares no results.

    Raises InputError for a tracker that is not "host:port", or an empty key.
    """
    host, colon, port = tracker.rpartition(":")
    if not colon or not port.isdigit():
        raise InputError(f"rpc_tracker={tracker!r} is not host:port")
    if not key:
        raise InputError("rpc_tracker needs an rpc_key, under which the devices are known to it")
    config = RPCConfig(host, int(port), key, session_timeout_sec=SESSION_SECONDS)
    return RPCRunner(config, TIMES, f_alloc_argument=allocate, max_workers=workers)


def allocate(session, device, arguments, repeat: int) -> list[list]:
    """Random numbers on a device, and zeros for integers, which are indices and counters."""
    fill = session.get_function(RANDOM_FILL)
    sets = []
    for _ in range(repeat):
        sets.append([])
        for _, dtype, shape in arguments:
            if "float" in dtype:
                tensor = tvm.runtime.empty(shape, dtype, device)
                fill(tensor)
            else:
                tensor = tvm.runtime.tensor(np.zeros(shape, dtype), device)
            sets[-1].append(tensor)
    return sets
