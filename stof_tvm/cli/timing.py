"""Times of calls on this device: warmed up, interleaved, medians and quartiles."""

import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

WARM_UP_CALLS, WARM_UP_SECONDS = 3, 0.2


def time_calls(calls: dict[str, Callable], repeats: int, progress: bool = False) -> list[dict]:
    """A row for each call: {"system", "first_ms", "median_ms", "quartiles_ms": [25 %, 75 %], "samples_ms"}.

    Every call is run once (what that takes is "first_ms", with whatever it prepares), then until it is warm, then
    `repeats` times, all calls in turn.  On a GPU a sample is the time between device events before and after the call,
    so gaps in which the GPU waits for the host count; elsewhere it is wall-clock time.
    """
    rows = [{"system": name, "first_ms": _wall_ms(call)} for name, call in calls.items()]
    for call in calls.values():
        _warm_up(call)
    sample = _device_ms if torch.cuda.is_available() else _wall_ms
    samples = [[] for _ in calls]
    for _ in tqdm(range(repeats), desc="bench", file=sys.stderr, disable=not progress):
        for taken, call in zip(samples, calls.values()):
            taken.append(sample(call))
    for row, taken in zip(rows, samples):
        low, median, high = _quartiles(taken)
        row.update(median_ms=median, quartiles_ms=[low, high], samples_ms=taken)
    return rows


def random_inputs(signature, device: str) -> tuple[tuple, dict]:
    """(args, kwargs) of a call: normal numbers, integers 0 and 1, which any vocabulary has, and True."""
    generator = torch.Generator().manual_seed(0)
    tensors = []
    for spec in signature.inputs:
        dtype = getattr(torch, spec.dtype)
        if dtype.is_floating_point:
            tensor = torch.randn(spec.shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            tensor = torch.ones(spec.shape, dtype=dtype)
        else:
            tensor = torch.randint(0, 2, spec.shape, generator=generator).to(dtype)
        tensors.append(tensor.to(device))
    return signature.nest_inputs(tensors)


def device_name() -> str:
    """The GPU's name, else the processor's."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _warm_up(call: Callable) -> None:
    started, calls = time.perf_counter(), 0
    while calls < WARM_UP_CALLS or time.perf_counter() - started < WARM_UP_SECONDS:
        call()
        calls += 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _wall_ms(call: Callable) -> float:
    started = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3


def _device_ms(call: Callable) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def _quartiles(samples: list[float]) -> list[float]:
    return samples * 3 if len(samples) == 1 else statistics.quantiles(samples, n=4, method="inclusive")
