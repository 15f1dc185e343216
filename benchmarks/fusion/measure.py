"""Times one case after another: every system is checked against float32 first, then timed, all of a case together."""

import traceback
from collections.abc import Callable, Iterator

import torch

from benchmarks.fusion import stof, torch_systems
from benchmarks.fusion.cases import FusionCase
from benchmarks.fusion.torch_systems import PARTIAL, sequence
from benchmarks.peers.results import ERROR_FACTOR
from benchmarks.peers.timing import device_samples_us, input_sets, wall_samples_us
from tir_kernels.errors import DeviceError

CAUSE_LENGTH = 300
Build = tuple[tuple[stof.Kernel, ...], Callable[[], list[str]]]  # kernels, and a function that waits for their files


class Broken(Exception):
    """The CUDA context is unusable: nothing more can be timed in this process."""


class Inputs:
    """Sets of random inputs that take turns, so that none is in the L2 cache; the first set's exact output."""

    def __init__(self, case: FusionCase, device: str, seed: int):
        self.case = case
        dtype = getattr(torch, case.dtype)
        generator = torch.Generator(device=device).manual_seed(seed)
        count = input_sets(case.bytes_moved, case.bytes_moved, device)
        self.sets = [self._draw(case, generator, device, dtype) for _ in range(count)]
        self.expected = sequence(case, *(x.float() for x in self.sets[0]))
        half = sequence(case, *self.sets[0])
        rounding = torch.finfo(dtype).eps / 2 * float(self.expected.abs().max())
        self.half_error = max(float((half.float() - self.expected).abs().max()), rounding)

    @staticmethod
    def _draw(case, generator, device, dtype) -> list[torch.Tensor]:
        tensors = [torch.randn(shape, generator=generator, device=device) for shape in case.input_shapes]
        if case.k:
            tensors[1] *= case.k**-0.5  # elements of the product are about one
        if case.inner:
            tensors[3] *= case.inner**-0.5
        return [x.to(dtype) for x in tensors]

    def error(self, out: torch.Tensor) -> float:
        """Largest error; NaN where any element is not finite."""
        return float((out.float() - self.expected).abs().max()) if bool(out.isfinite().all()) else float("nan")


def measure(case: FusionCase, systems, builds: dict[str, list[Build]], device: str, seed: int) -> Iterator[dict]:
    """A row for each system of a case: times and errors, or why it failed.  Broken ends it after a CUDA error."""
    inputs = Inputs(case, device, seed)
    for system in systems:
        row = {"case": case.to_json(), "system": system}
        try:
            if system in builds:
                row |= _fastest(builds[system], inputs, device)
            else:
                row["variant"] = f"torch {torch.__version__}"
                row |= _time(torch_systems.prepare(system, case), inputs, device, exact=system not in PARTIAL)
        except Exception as error:
            traceback.print_exception(error)
            row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:CAUSE_LENGTH]
        yield row
        if "CUDA error" in row.get("failed", "") and "out of memory" not in row["failed"]:
            raise Broken(row["failed"])


def _fastest(builds: list[Build], inputs: Inputs, device: str) -> dict:
    """The row of the fastest of some kernels, or of the only one; one that is wrong is the row, whatever its time."""
    found = []
    for kernels, wait in builds:
        paths = wait()
        if device != "cuda":
            raise DeviceError("compiled, but only a GPU can run it")
        kernel = stof.load(kernels, paths)
        call = lambda *some, kernel=kernel: kernel(*inputs.case.arguments(some))
        row = {"variant": " + ".join(kernel.label for kernel in kernels), "predicted_us": stof.predicted_us(kernels)}
        found.append(row | _time(call, inputs, device))
        if not found[-1]["error"] <= ERROR_FACTOR * inputs.half_error:
            return found[-1]
    return min(found, key=lambda row: row["median_us"])


def _time(call, inputs: Inputs, device: str, exact: bool = True) -> dict:
    first = inputs.sets[0]
    call(*first)  # compiles what is not compiled
    # The allocator hands the output memory that was poisoned.
    poison = torch.full_like(inputs.expected, float("nan"), dtype=first[0].dtype)
    del poison
    out = call(*first)
    error = inputs.error(out) if exact else 0.0
    del out
    calls = [lambda some=some: call(*some) for some in inputs.sets]
    wall = sorted(wall_samples_us(calls, device))
    samples = sorted(device_samples_us(calls, device))
    return {
        "median_us": _rounded(samples[len(samples) // 2]),
        "wall_us": _rounded(wall[len(wall) // 2]),
        "samples_us": [_rounded(sample) for sample in samples],
        "error": error,
        "half_error": inputs.half_error,
        "input_sets": len(inputs.sets),
    }


def _rounded(microseconds: float) -> float:
    return float(f"{microseconds:.5g}")
