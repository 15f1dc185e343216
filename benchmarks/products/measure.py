"""Times the systems of a product side by side: each is checked first, then graphs are replayed in turns.

On a GPU each product is timed between two copies, as it is in a model (between.py).
"""

import statistics
import traceback
from collections.abc import Callable, Iterator

import torch

from benchmarks.fusion import stof
from benchmarks.fusion.measure import CAUSE_LENGTH, Broken
from benchmarks.peers.results import ERROR_FACTOR
from benchmarks.peers.timing import Replays, input_sets, wall_samples_us
from benchmarks.products.between import Between
from benchmarks.products.cases import ProductCase
from benchmarks.products.cublas import call_of, systems_for
from benchmarks.products.results import ALONE, BEST, CUBLAS, OURS
from tir_kernels.errors import DeviceError

ROUNDS = 5  # in which all systems of a case take turns
AGAIN_S = 0.03  # of warming up, between configurations that are timed one after the other
FASTEST = 5  # of these, which are timed again in turns: their order depends on what ran before
CHUNK_ELEMENTS = 1 << 28  # of a result that float64 and comparisons hold at a time
Build = tuple[stof.Kernel, Callable[[], str]]  # a kernel, and a function that waits for its file


class Inputs:
    """Sets of random inputs that take turns, so that none is in the L2 cache; the first set's product.

    `expected` is float32 (m, n), computed in float64.  `half_error` is the largest error of cuBLAS's, at least one
    rounding of the result.
    """

    def __init__(self, case: ProductCase, device: str, seed: int):
        self.case = case
        generator = torch.Generator(device=device).manual_seed(seed)
        count = input_sets(case.bytes_moved, case.bytes_moved, device)
        self.sets = [self._draw(generator, device) for _ in range(count)]
        self.expected = self._exact(*self.sets[0])
        rounding = torch.finfo(getattr(torch, case.dtype)).eps / 2 * float(self.expected.abs().max())
        self.half_error = max(self.error(call_of(CUBLAS, case, self.sets[0])()), rounding)
        self.between = None
        if device == "cuda":
            result = torch.empty(self.expected.shape, dtype=self.sets[0][0].dtype, device=device)
            self.between = Between([some[0] for some in self.sets], result)

    def error(self, out: torch.Tensor) -> float:
        """Largest error of a result (m, n) or in parts; NaN where any element is not finite."""
        out, found = out.reshape(self.expected.shape), 0.0
        for rows in self._chunks():
            if not bool(out[rows].isfinite().all()):
                return float("nan")
            found = max(found, float((out[rows].float() - self.expected[rows]).abs().max()))
        return found

    def replays(self, calls: list[Callable], device: str) -> Replays:
        """Graphs of a system's calls, one for each set; on a GPU between copies."""
        return Replays(calls if self.between is None else self.between.around(calls), device)

    def alone(self, samples: list[float]) -> list[float]:
        """Samples of such graphs without the copies' own time."""
        return samples if self.between is None else [us - self.between.us for us in samples]

    def _draw(self, generator, device) -> list[torch.Tensor]:
        shapes = [shape for shape, _ in self.case.problem.inputs]
        tensors = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        tensors[1] *= self.case.k**-0.5  # elements of the product are about one
        return [x.to(getattr(torch, self.case.dtype)) for x in tensors]

    def _exact(self, a, w, *bias) -> torch.Tensor:
        case, rows = self.case, self.case.m // self.case.batch
        out = torch.empty(case.m, case.n, device=a.device)
        matrices = w.view(case.matrices, -1, w.shape[1])
        for part in range(case.batch):
            matrix = matrices[part % case.matrices].double()
            matrix = matrix.T if case.w_layout == "nk" else matrix
            for some in self._chunks(part * rows, (part + 1) * rows):
                exact = a[some].double() @ matrix
                out[some] = exact + bias[0][: case.n].double() if bias else exact
        return out

    def _chunks(self, begin: int = 0, end: int | None = None) -> Iterator[slice]:
        end, step = self.case.m if end is None else end, max(1, CHUNK_ELEMENTS // self.case.n)
        return (slice(at, min(at + step, end)) for at in range(begin, end, step))


def measure(case: ProductCase, builds: dict[str, list[Build]], device: str, seed: int) -> Iterator[dict]:
    """A row for each system of a case: times and errors, or why it failed.  Broken ends it after a CUDA error.

    `builds` has the kernels of `OURS` and perhaps those of `BEST`, which are timed after all else.
    """
    inputs, rows, ready = Inputs(case, device, seed), {}, {}
    for system in (OURS, *systems_for(case)):
        row = rows[system] = {"case": case.to_json(), "system": system}
        try:
            if system == OURS:
                ((kernel, wait),) = builds[OURS]
                row |= {"variant": kernel.label, "predicted_us": kernel.predicted_us}
                calls = _calls(kernel, wait(), inputs, device)
            else:
                row["variant"] = f"torch {torch.__version__}"
                calls = [call_of(system, case, some) for some in inputs.sets]
            row |= _checked(calls, inputs, exact=system != ALONE) | {"between": inputs.between is not None}
            row["wall_us"] = _rounded(statistics.median(wall_samples_us(calls, device)))
            ready[system] = inputs.replays(calls, device)
        except Exception as error:
            row |= _failed(error)
    for system, samples in _in_turns(ready, inputs).items():
        rows[system] |= {"median_us": _rounded(statistics.median(samples)), "samples_us": list(map(_rounded, samples))}
    yield from rows.values()
    ready.clear()
    if BEST in builds:
        yield {"case": case.to_json(), "system": BEST} | _best(builds[BEST], inputs, device)


def _in_turns(ready: dict[str, Replays], inputs: Inputs) -> dict[str, list[float]]:
    """Samples of each system: warmed up to the clock that lasts, then some in each round, in alternating order."""
    samples: dict[str, list[float]] = {name: [] for name in ready}
    for replays in ready.values():
        replays.warm_up()
    for number in range(ROUNDS):
        for name in list(ready)[:: -1 if number % 2 else 1]:
            samples[name] += ready[name].samples(share=ROUNDS)
    return {name: sorted(inputs.alone(some)) for name, some in samples.items()}


def _best(builds: list[Build], inputs: Inputs, device: str) -> dict:
    """The row of the fastest of all configurations: `medians_us` has a time of each that works, `not_timed` the rest.

    The first, the default, and the fastest others are timed again in turns.  The times of the rest are scaled as these
    changed.
    """
    found, causes, errors, all_calls = {}, {}, {}, {}
    for kernel, wait in builds:
        label = kernel.label
        try:
            calls = _calls(kernel, wait(), inputs, device)
            errors[label] = _checked(calls, inputs)["error"]
            if not errors[label] <= ERROR_FACTOR * inputs.half_error:
                raise ArithmeticError(f"error {errors[label]:.2e}, cuBLAS {inputs.half_error:.2e}")
            replays = inputs.replays(calls, device)
            replays.warm_up(AGAIN_S)
            found[label], all_calls[label] = statistics.median(inputs.alone(replays.samples())), calls
        except Exception as error:
            causes[label] = _failed(error)["failed"]
    if not found:
        return {"failed": next(iter(causes.values()), "no configuration")}
    again = dict.fromkeys([label for label in [builds[0][0].label] if label in found])
    again |= dict.fromkeys(sorted(found, key=found.__getitem__)[:FASTEST])
    turns = _in_turns({label: inputs.replays(all_calls[label], device) for label in again}, inputs)
    medians = {label: statistics.median(samples) for label, samples in turns.items()}
    scale = statistics.geometric_mean(us / found[label] for label, us in medians.items())
    found = {label: _rounded(medians.get(label, us * scale)) for label, us in found.items()}
    best = min(found, key=found.__getitem__)
    return {
        "variant": best,
        "median_us": found[best],
        "medians_us": dict(sorted(found.items(), key=lambda item: item[1])),
        "not_timed": causes,
        "error": errors[best],
        "half_error": inputs.half_error,
    }


def _calls(kernel: stof.Kernel, path: str, inputs: Inputs, device: str) -> list[Callable]:
    if device != "cuda":
        raise DeviceError("compiled, but only a GPU can run it")
    loaded = stof.load((kernel,), [path])
    return [lambda some=some: loaded(*some) for some in inputs.sets]


def _checked(calls: list[Callable], inputs: Inputs, exact: bool = True) -> dict:
    """Errors of the first call, whose output gets memory that was poisoned."""
    poison = torch.full_like(inputs.expected, float("nan"), dtype=inputs.sets[0][0].dtype)
    del poison
    error = inputs.error(calls[0]()) if exact else 0.0
    return {"error": error, "half_error": inputs.half_error, "input_sets": len(calls)}


def _failed(error: Exception) -> dict:
    traceback.print_exception(error)
    cause = " ".join(f"{type(error).__name__}: {error}".split())[:CAUSE_LENGTH]
    if "CUDA error" in cause and "out of memory" not in cause:
        raise Broken(cause)
    return {"failed": cause}


def _rounded(microseconds: float) -> float:
    return float(f"{microseconds:.5g}")
