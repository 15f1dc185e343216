"""One system on one case of the zoo: made ready at once, checked and timed when it is its turn (models/worker.py)."""

import gc
from collections.abc import Callable

import torch

from benchmarks.models.measure import INPUTS, compare, times, warm_up
from benchmarks.zoo.cases import ZooCase
from benchmarks.zoo.make import make_inputs, make_model
from benchmarks.zoo.outside import shares
from benchmarks.zoo.systems import OURS, TUNED, prepare

MIB = 1 << 20


def get_ready(
    case: ZooCase, name: str, device: str, small: bool, logs: str | None = None
) -> tuple[dict, Callable[[], dict]]:
    """Prepare a system and call it until it is warm; the memory of that, and a function that measures the rest.

    `peak_mb` is the most that PyTorch's allocator held in the first calls, in which CUDA graphs get their memory; an
    engine has all that it writes, and its weights, from this allocator too.
    """
    system, facts = prepare(name, case, device, small, logs)
    inputs = make_inputs(case, INPUTS, device)
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    warm_up(system, inputs, device)
    if device == "cuda":
        facts["peak_mb"] = round(torch.cuda.max_memory_allocated() / MIB)
    reference = make_model(case, small=small)  # on the CPU: GPU memory holds the systems of many processes

    def measure() -> dict:
        error, half_error = compare(system.call, reference.to(device), inputs[0])
        reference.to("meta")
        row = {"variant": system.variant, **times(system, inputs, device), "error": error, "half_error": half_error}
        found = shares(row["kernels"])
        if name not in (OURS, TUNED):
            found.pop("outside", None)
        return row | found

    return facts, measure
