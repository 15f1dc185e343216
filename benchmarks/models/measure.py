"""One system on one case: made ready at once, checked and timed when it is its turn (worker.py)."""

from collections.abc import Callable

import torch

from benchmarks.models.cases import ModelCase
from benchmarks.models.families import make_inputs
from benchmarks.models.systems import System, prepare
from benchmarks.peers.patterns import shared_pattern
from benchmarks.peers.timing import wall_samples_us

INPUTS = 4  # sets that take turns; a model's weights exceed the L2 cache by themselves
WARM_UP = 3  # calls; PyTorch captures its CUDA graph at the second
SAMPLES = 15
SAMPLE_US = 20000.0  # a sample is as many calls as take this long


def get_ready(case: ModelCase, name: str, device: str, small: bool) -> tuple[dict, Callable[[], dict]]:
    """Prepare a system and call it until it is warm (worker.py); nothing of the row is known before it is measured."""
    system = prepare(name, case, shared_pattern(case.mask, case.sequence, case.sequence, device), device, small)
    inputs = make_inputs(case, INPUTS, device)
    warm_up(system, inputs, device)
    return {}, lambda: measure(system, case, inputs, device, small)


def warm_up(system: System, inputs: list[torch.Tensor], device: str) -> None:
    """The first calls, which compile and capture."""
    for x in inputs[:WARM_UP]:
        system.call(x)
    if device == "cuda":
        torch.cuda.synchronize()


def measure(system: System, case: ModelCase, inputs: list[torch.Tensor], device: str, small: bool = False) -> dict:
    """Errors against float32, device and wall-clock times, and the kernels of a call."""
    error, half_error = errors(system, case, inputs[0], device, small)
    return {"variant": system.variant, **times(system, inputs, device), "error": error, "half_error": half_error}


def times(system: System, inputs: list[torch.Tensor], device: str) -> dict:
    """Device and wall-clock microseconds of a call, and its kernels; on the CPU no kernels."""
    calls = [lambda x=x: system.call(x) for x in inputs]
    return {**clocked(calls, device), "kernels": kernels(calls[0]) if device == "cuda" else []}


def clocked(calls: list[Callable], device: str) -> dict:
    """Device and wall-clock microseconds of calls that take turns."""
    wall = sorted(wall_samples_us(calls, device))
    samples = sorted(device_samples_us(calls) if device == "cuda" else wall)
    return {
        "median_us": _rounded(samples[len(samples) // 2]),
        "wall_us": _rounded(wall[len(wall) // 2]),
        "samples_us": [_rounded(sample) for sample in samples],
    }


def errors(system: System, case: ModelCase, x: torch.Tensor, device: str, small: bool) -> tuple[float, float]:
    """Largest errors of the system, and of PyTorch in the case's precision, against PyTorch in float32."""
    from benchmarks.models.peers import torch_model

    pattern = shared_pattern(case.mask, case.sequence, case.sequence, device)
    model = torch_model(case, pattern, device, small=small)
    return compare(system.call, model, x)


def compare(call: Callable, model: torch.nn.Module, x: torch.Tensor) -> tuple[float, float]:
    """Largest errors of a call, and of a model in half precision, against this model in float32, which it then is."""
    half = model(x).float()
    expected = model.float()(x.float() if x.is_floating_point() else x)
    out = call(x).float()
    error = float((out - expected).abs().max()) if bool(out.isfinite().all()) else float("nan")
    return error, max(float((half - expected).abs().max()), torch.finfo(torch.float32).eps)


def device_samples_us(calls) -> list[float]:
    """Microseconds of one call: device events around calls one after another, nothing waited for in between."""
    first = _sample_us(calls, len(calls))
    count = max(1, round(SAMPLE_US / first / len(calls))) * len(calls)
    return [_sample_us(calls, count) for _ in range(SAMPLES)]


def _sample_us(calls, count: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for number in range(count):
        calls[number % len(calls)]()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / count


def kernels(call) -> list[list]:
    """[name, launches, microseconds] of each GPU kernel in a call, longest first, by PyTorch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.key_averages() if event.device_time_total > 0]
    events.sort(key=lambda event: -event.device_time_total)
    return [[event.key[:80], event.count, round(event.device_time_total, 1)] for event in events]


def _rounded(microseconds: float) -> float:
    return float(f"{microseconds:.5g}")
