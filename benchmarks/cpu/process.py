"""A process for one system on one case, which does one thing at a time when it is told to."""

import contextlib
import multiprocessing
import os
import time
import traceback
from pathlib import Path

import torch

from benchmarks.cpu.cases import make_input, make_model
from benchmarks.cpu.systems import prepare
from benchmarks.models.cases import ModelCase

CAUSE_LENGTH = 300
REFERENCE = "reference"  # stands for a system: the float64 result, and eager float32's error
LEAST_BOUND = 1e-5  # half of the largest error that a float32 result of unit scale may have


class Process:
    """The process, seen from the one that plans.  `failed` says why it did not come through, once that is known."""

    def __init__(self, case: ModelCase, system: str, threads: int, folder: Path, small: bool, log: Path):
        context = multiprocessing.get_context("spawn")
        self.case, self.system, self.failed = case, system, None
        self.connection, theirs = context.Pipe()
        arguments = theirs, case, system, threads, folder, small, str(log)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def receive(self, deadline: float):
        """The next answer; None where the process failed, died, or is late, which ends it."""
        if self.failed is not None:
            return None
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            self._fail("not ready in time")
            return None
        try:
            kind, value = self.connection.recv()
        except EOFError:
            self.process.join()
            self._fail(f"the process died with exit code {self.process.exitcode}")
            return None
        if kind == "failed":
            self._fail(value)
            return None
        return value

    def ask(self, what: str, deadline: float):
        """Send a request, "time" or "error", and receive its answer."""
        if self.failed is not None:
            return None
        self.connection.send(what)
        return self.receive(deadline)

    def close(self) -> None:
        self.process.kill()
        self.process.join()

    def _fail(self, cause: str) -> None:
        self.failed = cause
        self.close()


def serve(connection, case: ModelCase, name: str, threads: int, folder: Path, small: bool, log: str) -> None:
    """Send ("ready", fields); then answer "time" with microseconds of a call, and "error" with errors."""
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    path = reference_path(case, folder, small)
    try:
        with torch.no_grad():
            start = time.perf_counter()
            if name == REFERENCE:
                write_reference(case, path, threads, small)
                connection.send(("ready", {}))
                return
            system = prepare(name, case, threads, folder, small)
            for _ in range(2):
                system.call()
            seconds = round(time.perf_counter() - start, 1)
            connection.send(("ready", {"variant": system.variant, "prepare_s": seconds}))
            while True:
                if connection.recv() == "time":
                    begin = time.perf_counter()
                    system.call()
                    connection.send(("time", (time.perf_counter() - begin) * 1e6))
                else:
                    expected, bound = torch.load(path)
                    out = system.call().double()
                    error = float((out - expected).abs().max()) if bool(out.isfinite().all()) else float("nan")
                    connection.send(("error", {"error": error, "half_error": bound}))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exception(error)
        with contextlib.suppress(OSError):
            connection.send(("failed", " ".join(f"{type(error).__name__}: {error}".split())[:CAUSE_LENGTH]))


def reference_path(case: ModelCase, folder: Path, small: bool) -> Path:
    return folder / f"{'small-' if small else ''}{case.model}-{case.shape}-reference.pt"


def write_reference(case: ModelCase, path: Path, threads: int, small: bool) -> None:
    """Save the float64 result, and eager float32's largest error, or LEAST_BOUND where that is more."""
    if path.exists():
        return
    torch.set_num_threads(threads)
    model, x = make_model(case, small=small), make_input(case)
    out = model(x)
    expected = model.double()(x.double() if x.is_floating_point() else x)
    new = path.with_suffix(".new")
    torch.save((expected, max(float((out - expected).abs().max()), LEAST_BOUND)), new)
    new.replace(path)
