"""A worker process: prepares cases (compiling) when told to, and times them when it is its turn."""

import traceback
from multiprocessing.connection import Connection

import torch
from torch.autograd import DeviceType

from benchmarks.peers.accuracy import Reference
from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern, shared_pattern
from benchmarks.peers.system import Prepared
from benchmarks.peers.systems import prepare
from benchmarks.peers.timing import device_samples_us, input_sets, wall_samples_us

CAUSE_LENGTH = 300


def serve(connection: Connection, device: str) -> None:
    """Answer ("prepare" | "time" | "kernels", case, systems) until the connection closes.

    Each command ends in ("done", None).  Before it, "time" sends one ("row", fields) a system, as soon as there is one,
    so that nothing is lost if the process dies, and "kernels" one ("kernels", {system: names}).  ("broken", None) ends
    a command, and the process, after an error that leaves the CUDA context unusable.
    """
    worker = Worker(device)
    while True:
        try:
            command, case, systems = connection.recv()
        except EOFError:
            return
        with torch.no_grad():
            for answer in getattr(worker, command)(case, systems):
                connection.send(answer)
        if device == "cuda":
            torch.cuda.empty_cache()  # many processes share the GPU's memory
        connection.send(("broken" if worker.broken else "done", None))
        if worker.broken:
            return


class Worker:
    """What has been prepared in this process; preparing twice is free."""

    def __init__(self, device: str):
        self.device, self.prepared, self.failed, self.broken = device, {}, {}, False

    def prepare(self, case: Case, systems):
        """Compile each system for the case and run it once; yields nothing.

        Many processes do so at a time: what the GPU's memory did not hold then is tried again when timed.
        """
        try:
            inputs = self._inputs(case, 1)[0]
        except torch.OutOfMemoryError:
            return ()
        for system in systems:
            if not self.broken:
                self._ready(system, case, inputs)
        self.failed = {key: why for key, why in self.failed.items() if "OutOfMemoryError" not in why}
        return ()

    def time(self, case: Case, systems):
        """Yield a row for each system: times, errors, or why it failed."""
        pattern = self._pattern(case)
        q_bytes = case.batch * case.heads * case.q_len * case.head_dim * 2
        kv_bytes = 2 * case.batch * case.kv_heads * case.kv_len * case.head_dim * 2
        count = input_sets(2 * q_bytes + kv_bytes * pattern.used_keys, 2 * q_bytes + kv_bytes, self.device)
        inputs = self._inputs(case, count)
        reference = Reference(*inputs[0], pattern.rows)
        for system in systems:
            row = {"case": case.to_json(pattern.density), "system": system}
            ready = self._ready(system, case, inputs[0])
            if ready is not None:
                try:
                    row |= self._measure(ready, inputs, reference)
                except Exception as error:
                    self._fail(system, case, error)
            if (system, case) in self.failed:
                row["failed"] = self.failed[system, case]
            yield "row", row
            if self.broken:
                return

    def kernels(self, case: Case, systems):
        """Yield the names of the GPU kernels that each system launches, by PyTorch's profiler."""
        inputs, names = self._inputs(case, 1)[0], {}
        for system in systems:
            ready = self._ready(system, case, inputs)
            if ready is not None:
                arranged = ready.arrange(*inputs)
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                    ready.call(*arranged)
                    torch.cuda.synchronize()
                names[system] = sorted({e.name for e in profile.events() if e.device_type == DeviceType.CUDA})
        yield "kernels", names

    def _ready(self, system: str, case: Case, inputs) -> Prepared | None:
        """The system, compiled and run once; None if that failed, now or before."""
        key = system, case
        if key not in self.prepared and key not in self.failed:
            try:
                ready = prepare(system, case, self._pattern(case), self.device)
                ready.call(*ready.arrange(*inputs))
                if self.device == "cuda":
                    torch.cuda.synchronize()
                self.prepared[key] = ready
            except Exception as error:
                self._fail(system, case, error)
        return self.prepared.get(key)

    def _measure(self, ready: Prepared, inputs, reference: Reference) -> dict:
        arranged = [ready.arrange(*some) for some in inputs]
        poison = torch.full_like(inputs[0][0], float("nan"))
        del poison  # the allocator hands this memory to the output
        error = reference.error(ready.restore(ready.call(*arranged[0])))
        calls = [lambda some=some: ready.call(*some) for some in arranged]
        wall = sorted(wall_samples_us(calls, self.device))
        samples = sorted(device_samples_us(calls, self.device))
        row = {
            "variant": ready.variant,
            "median_us": _rounded(samples[len(samples) // 2]),
            "wall_us": _rounded(wall[len(wall) // 2]),
            "samples_us": [_rounded(sample) for sample in samples],
            "error": error,
            "half_error": reference.half_error,
            "input_sets": len(inputs),
        }
        return row if ready.scheduled is None else row | {"scheduled": ready.scheduled}

    def _fail(self, system: str, case: Case, error: Exception) -> None:
        self.prepared.pop((system, case), None)
        traceback.print_exception(error)
        cause = " ".join(f"{type(error).__name__}: {error}".split())
        self.failed[system, case] = cause[:CAUSE_LENGTH]
        self.broken = "CUDA error" in cause and "out of memory" not in cause

    def _pattern(self, case: Case) -> Pattern:
        return shared_pattern(case.mask, case.q_len, case.kv_len, self.device)

    def _inputs(self, case: Case, count: int) -> list[tuple[torch.Tensor, ...]]:
        """`count` sets of q, k, v, standard normal, the same in every process."""
        generator = torch.Generator(device=self.device).manual_seed(0)
        dtype = getattr(torch, case.dtype)
        q_shape = case.batch, case.heads, case.q_len, case.head_dim
        kv_shape = case.batch, case.kv_heads, case.kv_len, case.head_dim
        return [
            tuple(
                torch.randn(shape, dtype=dtype, device=self.device, generator=generator)
                for shape in (q_shape, kv_shape, kv_shape)
            )
            for _ in range(count)
        ]


def _rounded(microseconds: float) -> float:
    return float(f"{microseconds:.5g}")
