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


def first_call(call: Callable, device: str) -> tuple:
    """(result, milliseconds) of a first call, including what that call prepares; `device` is "cuda" or "cpu"."""
    started = time.perf_counter()
    result = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, (time.perf_counter() - started) * 1e3


def time_calls(calls: dict[str, Callable], device: str, repeats: int, progress: bool = False) -> list[dict]:
    """A row for each call: {"system", "median_ms", "quartiles_ms": [25 %, 75 %], "samples_ms"}.

    Each is called until it is warm, then all are called in turn, `repeats` times.  On a GPU a sample is the time
    between device events before and after the call, so gaps in which the GPU waits for the host count; elsewhere it
    is wall-clock time.
    """
    for call in calls.values():
        _warm_up(call, device)
    sample = _device_ms if device == "cuda" else _wall_ms
    samples = {name: [] for name in calls}
    for _ in tqdm(range(repeats), desc="bench", file=sys.stderr, disable=not progress):
        for name, call in calls.items():
            samples[name].append(sample(call))
    return [_row(name, taken) for name, taken in samples.items()]


def random_inputs(signature, device: str) -> tuple[tuple, dict]:
    """(args, kwargs) of a call: normally distributed floats, integers 0 and 1 (in any vocabulary), bools True."""
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


def device_name(device: str) -> str:
    """The GPU's name, or the processor's."""
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {torch.get_num_threads()} threads"


def _warm_up(call: Callable, device: str) -> None:
    started, calls = time.perf_counter(), 0
    while calls < WARM_UP_CALLS or time.perf_counter() - started < WARM_UP_SECONDS:
        call()
        calls += 1
    if device == "cuda":
        torch.cuda.synchronize()


def _wall_ms(call: Callable) -> float:
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e3


def _device_ms(call: Callable) -> float:
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def _row(system: str, samples: list[float]) -> dict:
    # A single sample is its own median and quartiles.
    low, median, high = statistics.quantiles(samples, method="inclusive") if len(samples) > 1 else samples * 3
    return {"system": system, "median_ms": median, "quartiles_ms": [low, high], "samples_ms": samples}
