"""The code of the process that owns the device: one library is checked, then timed.

A GPU is timed by events around replays of a CUDA graph in which sets of inputs take turns, a CPU by the wall clock.
"""

import functools
import itertools
import math
import time
from pathlib import Path

import torch
import tvm

from stof_tvm.tuning.measuring.cases import case_of
from stof_tvm.tuning.measuring.job import KernelJob, read_note
from tir_kernels.compiling.cpu_threads import use_all_cores

SAMPLES = 5
GRAPH_US = 800.0  # a graph holds enough launches for this long
MAX_LAUNCHES = 128
CPU_SAMPLE_S = 0.004
# On a CPU samples are taken until their lower half agrees, or there are MOST_SAMPLES: disturbances only lengthen them.
AGREEMENT = 0.03
MOST_SAMPLES = 40
KEPT_CASES = 12


def measure(library: str, device: str, seed: int) -> tuple[float | None, str | None]:
    """(microseconds, None), or (None, why the library is wrong)."""
    where = torch.device(device)
    if where.type == "cpu":
        use_all_cores()
    folder = Path(library).parent
    job = read_note(folder)
    shared = KernelJob("", job.problem, None, job.mask) if isinstance(job, KernelJob) else job
    case = _case(shared, folder.parent, where, seed)
    function = tvm.runtime.load_module(library)["main"]
    arguments = case.arguments(job)
    case.poison()
    with torch.no_grad():
        function(*arguments(case.sets[0]))
        _wait(where)
        if (mistake := case.mistake()) is not None:
            return None, mistake
        calls = [functools.partial(function, *arguments(inputs)) for inputs in case.sets]
        return (_gpu_us(calls) if where.type == "cuda" else _cpu_us(calls)), None


@functools.lru_cache(maxsize=KEPT_CASES)
def _case(job, folder: Path, device, seed: int):
    with torch.no_grad():
        return case_of(job, folder, device, seed)


@functools.cache
def _capture_stream():
    return torch.cuda.Stream()


def _wait(device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _gpu_us(calls) -> float:
    """Median over replays of the mean of a graph's launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def elapsed_us(work) -> float:
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000

    once = elapsed_us(lambda: [call() for call in calls])
    rounds = max(1, min(math.ceil(GRAPH_US / once), MAX_LAUNCHES // len(calls)))
    graph = torch.cuda.CUDAGraph()
    # Not `torch.cuda.graph`, which collects garbage and empties the allocator's cache before each capture.
    with torch.cuda.stream(_capture_stream()):
        graph.capture_begin()
        for call in itertools.islice(itertools.cycle(calls), rounds * len(calls)):
            call()
        graph.capture_end()
    elapsed_us(graph.replay)
    return sorted(elapsed_us(graph.replay) for _ in range(SAMPLES))[SAMPLES // 2] / (rounds * len(calls))


def _cpu_us(calls) -> float:
    """The lower quartile of samples, taken until they agree; each is the mean of calls that fill CPU_SAMPLE_S."""
    (call,) = calls
    start = time.perf_counter()
    call()
    once = time.perf_counter() - start
    count = max(1, math.ceil(CPU_SAMPLE_S / once))
    samples = []
    while len(samples) < MOST_SAMPLES:
        start = time.perf_counter()
        for _ in range(count):
            call()
        samples.append((time.perf_counter() - start) * 1e6 / count)
        ordered = sorted(samples)
        if len(samples) >= SAMPLES and ordered[len(samples) // 2] <= (1 + AGREEMENT) * ordered[0]:
            break
    return ordered[len(samples) // 4]
