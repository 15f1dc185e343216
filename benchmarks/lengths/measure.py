"""One system at many lengths: each is called for the first time, then checked, then timed (models/worker.py)."""

import gc
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.lengths.cases import BATCH, MEMORY, LengthCase, Sizes
from benchmarks.lengths.models import make_inputs, make_model
from benchmarks.lengths.systems import BUCKETS, DYNAMIC, LAZY, OURS, RANGE, System, bucket_of, prepare
from benchmarks.models.measure import INPUTS, clocked

MIB = 1 << 20
AWAKE = 10  # times that known inputs are called before a first call
WARM_UP = 3  # calls; PyTorch captures its CUDA graph at the second


def get_ready(
    cases: tuple[LengthCase, ...],
    name: str,
    mode: str,
    device: str,
    small: bool,
    sizes: Sizes,
    buckets: tuple[int, ...] | None = None,
) -> tuple[dict, Callable[[], Iterator[dict]]]:
    """Prepare a system for cases of one model, and warm it up at lengths that are none of theirs.

    What compiles for a shape at its first calls is called with the cases' shapes, or their buckets.  The second result
    measures the cases, and gives the fields of a row for each, `case` among them.
    """
    system, facts = prepare(name, cases[0], sizes, mode, device, small, buckets)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    known: list = []
    for length in _warm_lengths(cases, name, mode, sizes):
        known = make_inputs(_at(cases[0], length), WARM_UP, device, sizes)
        for inputs in known:
            system.call(*inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    return facts, lambda: _measure(system, cases, name, device, small, sizes, known)


def _warm_lengths(cases, name: str, mode: str, sizes: Sizes) -> list[int]:
    known = sorted({case.length for case in cases})
    if name == BUCKETS:
        least = bucket_of(sizes.shortest, 1)
        return sorted({min(bucket_of(length, least), sizes.longest) for length in known})
    if name == DYNAMIC or name == OURS and mode != LAZY:
        return known if cases[0].kind == BATCH else [sizes.other_length()]
    return [] if name == OURS else known


def _measure(system: System, cases, name: str, device: str, small: bool, sizes: Sizes, known: list) -> Iterator[dict]:
    first = {case: _first_call(system, case, device, sizes, known) for case in cases}
    if name in RANGE and any(case.kind == MEMORY for case in cases):
        measured = {case.length for case in cases}  # a call that goes on after an interruption has some only
        for length in sorted(set(sizes.lengths()) - measured):
            _first_call(system, _at(cases[0], length), device, sizes, known)
    peak = round(torch.cuda.max_memory_allocated() / MIB) if device == "cuda" else None
    half, exact = (make_model(cases[0], small).to(device) for _ in range(2))
    exact.float()
    for case in cases:
        out, first_us = first.pop(case)
        inputs = make_inputs(case, INPUTS, device, sizes)
        error, half_error = _errors(out, half, exact, inputs[0])
        calls = [lambda x=x: system.call(*x) for x in inputs]
        row = {"variant": system.variant, **clocked(calls, device), "error": error, "half_error": half_error}
        memory = {"peak_mb": peak} if case.kind == MEMORY else {}
        yield {"case": case, "first_us": first_us, **row, **memory}


def _first_call(system: System, case: LengthCase, device: str, sizes: Sizes, known: list) -> tuple[torch.Tensor, float]:
    """The result, on the CPU, and the microseconds until it was there, on the device.

    Calls with inputs that are known come just before it: a GPU that had nothing to do begins with a slower clock.
    """
    inputs = make_inputs(case, 1, device, sizes)[0]
    gc.collect()
    for _ in range(AWAKE):
        for x in known:
            system.call(*x)
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    out = system.call(*inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    return out.cpu(), round(taken * 1e6, 1)


def _errors(out: torch.Tensor, half, exact, inputs: tuple[torch.Tensor, ...]) -> tuple[float, float]:
    """Largest errors of a result, and of PyTorch in half precision, against float32, at tokens that are real."""
    real = inputs[1].bool() if len(inputs) == 2 else torch.ones_like(inputs[0], dtype=torch.bool)
    expected = exact(*inputs)[real]
    out = out.to(expected.device)[real].float()
    error = float((out - expected).abs().max()) if bool(out.isfinite().all()) else float("nan")
    half_error = float((half(*inputs)[real].float() - expected).abs().max())
    return error, max(half_error, torch.finfo(torch.float32).eps)


def _at(case: LengthCase, length: int) -> LengthCase:
    return case if case.kind == BATCH else LengthCase("length", case.model, case.batch, length, case.dtype)
