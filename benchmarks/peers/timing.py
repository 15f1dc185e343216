"""Times of a call: device events around CUDA-graph replays, and the wall clock of single calls.

Repetitions adapt to the call, so that a measurement takes about a tenth of a second whatever is measured.
"""

import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

GRAPH_US = 2000.0  # a graph holds enough launches for this long
MAX_LAUNCHES = 256
# A GPU at its power limit lowers its clock some 20 ms after it began: by 10 to 15 % on an H200 under dense attention,
# by less under kernels that use less power.  Everything is timed at the clock that lasts.
WARM_UP_S = 0.12
SAMPLING_S = 0.05
SAMPLES = (5, 25)
L2_ROUNDS = 3  # rotated inputs are at least this many times the L2 cache
MAX_SETS = 64
MAX_SETS_BYTES = 16 << 30


def input_sets(touched_bytes: float, whole_bytes: int, device: str) -> int:
    """How many sets of inputs to rotate, so that none is in the L2 cache when its turn comes."""
    if device != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    wanted = math.ceil(L2_ROUNDS * cache / touched_bytes)
    return max(1, min(wanted, MAX_SETS, MAX_SETS_BYTES // whole_bytes))


def device_samples_us(calls: Sequence[Callable], device: str) -> list[float]:
    """Microseconds of one call, one number a replay of a graph in which the calls take turns.

    On the CPU, for dry runs, one wall-clock sample.
    """
    replays = Replays(calls, device)
    replays.warm_up()
    return replays.samples()


class Replays:
    """A CUDA graph in which some calls take turns; on the CPU, the calls themselves.

    Several of them can take turns too: what is compared then has the same clock.
    """

    def __init__(self, calls: Sequence[Callable], device: str):
        self.calls, self.device = calls, device
        if device != "cuda":
            return
        self.launches = _launches(_eager_us(calls), len(calls))
        self.graph, self.kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(self.graph):
            for _, call in zip(range(self.launches), itertools.cycle(calls)):
                self.kept.append(call())  # outputs stay alive, so that they rotate as well
        self.graph_us = _replay_us(self.graph)

    def warm_up(self, seconds: float = WARM_UP_S) -> None:
        """Replay until the GPU has the clock that lasts; where it was busy before, fewer seconds do."""
        if self.device == "cuda":
            for _ in range(math.ceil(seconds * 1e6 / self.graph_us)):
                self.graph.replay()

    def samples(self, share: int = 1) -> list[float]:
        """Microseconds of one call, one number a replay; with `share`, that part of them, after a replay untimed."""
        if self.device != "cuda":
            return wall_samples_us(self.calls, self.device)
        count = min(max(math.ceil(SAMPLING_S * 1e6 / self.graph_us), SAMPLES[0]), SAMPLES[1])
        if share > 1:
            self.graph.replay()
        return [_replay_us(self.graph) / self.launches for _ in range(math.ceil(count / share))]


def wall_samples_us(calls: Sequence[Callable], device: str) -> list[float]:
    """Microseconds from the call to the end of its work, host overhead included, one number a call."""
    samples, deadline = [], time.perf_counter() + SAMPLING_S
    for call in itertools.cycle(calls):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
        if len(samples) >= SAMPLES[1] or time.perf_counter() > deadline and len(samples) >= SAMPLES[0]:
            return samples


def _launches(call_us: float, n_sets: int) -> int:
    """A multiple of the number of input sets, but no more than MAX_LAUNCHES or one round."""
    rounds = min(math.ceil(GRAPH_US / call_us / n_sets), MAX_LAUNCHES // n_sets)
    return max(1, rounds) * n_sets


def _eager_us(calls) -> float:
    """A first guess: the mean over one round after another, which includes launch gaps."""
    for call in calls[:3]:
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls[:3]:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000 / len(calls[:3])


def _replay_us(graph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1000
