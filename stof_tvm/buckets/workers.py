"""The engines of buckets, built in forks of the process where there are processors for them.

The first one is built in the process itself.  So the forks find modules imported, weights loaded and logs read, and a
model that does not compile fails where its error can be seen.  An engine comes back as a library, in a file, and as the
parts around it; of its weights only those come back that the process did not hold when it forked.
"""

import functools
import os
import pickle
import shutil
import tempfile
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import tvm
from tvm.support import cc

from stof_tvm.buckets.bucket import Bucket
from stof_tvm.buckets.weights import SharedWeights
from stof_tvm.engine import Engine
from stof_tvm.frontend.padding.program import PaddedProgram
from stof_tvm.report import Report
from stof_tvm.running.machine import why_not_here
from stof_tvm.running.native_log import without_noise
from stof_tvm.saving.weights_file import Weights
from stof_tvm.signature import Signature
from tir_kernels.compiling.forks import Forks, cores
from tir_kernels.compiling.load_library import load_library
from tir_kernels.errors import CompileError, StofError
from tir_kernels.target import local_cuda_arch, local_gpu_name

WORTH_S = 1.0  # seconds that an engine must take to build; to fork, link and load takes some tenths
LEAST_BYTES = 1 << 30  # of memory for a fork, and as much as all weights: it packs some of them
LIBRARY, PARTS = "library.so", "parts"
CHUNK = 1 << 20  # bytes that are read at a time


@dataclass(frozen=True)
class Parts:
    """An engine and its bucket without their code; a weight is a tensor, or its number among those that are known."""

    padded: PaddedProgram
    signature: Signature
    report: Report
    mask_digests: list[str]
    memory: list[int]
    weights: list[int | torch.Tensor]


@dataclass(frozen=True)
class Failure:
    """Why a fork has no engine, with the lines that raised it; `error` is None for what a fork itself may be to blame.

    Such are CompileError and errors outside of the family.
    """

    error: Exception | None
    lines: str


def built(
    here: Sequence[Any],
    others: Sequence[Any],
    build: Callable[[Any], Bucket],
    empty: Callable[[Any, PaddedProgram], Bucket],
    weights: SharedWeights,
    target: tvm.target.Target,
) -> Iterator[tuple[Any, Bucket]]:
    """(a job, its bucket with an engine) for each job, in the order in which they are ready.

    Parameters
    ----------
    here : sequence
        The jobs to build in the process itself, at least one.
    others : sequence
        Those that forks may build.
    build : callable
        `build(job)` is the bucket; its engine has its weights from `weights`.
    empty : callable
        `empty(job, padded)` is the bucket without an engine.
    weights : SharedWeights
    target : tvm.target.Target

    Raises what `build` raises, in a fork as well; CompileError for a fork that something ended.
    """
    start = time.monotonic()
    yield here[0], build(here[0])
    later = list(here[1:])
    is_slow = time.monotonic() - start >= WORTH_S
    most = _most(weights) if is_slow and _can_come_back(target) else 1
    if most == 1 or not others:
        yield from ((job, build(job)) for job in (*later, *others))
        return
    with tempfile.TemporaryDirectory(prefix="stof_") as name:
        folders = [Path(name, str(number)) for number in range(len(others))]
        works = [functools.partial(_send, build, *pair, weights) for pair in zip(others, folders, strict=True)]
        with Forks(works, most - 1 if later else most) as forks:
            for job in later:
                yield job, build(job)
            left = dict(enumerate(others))
            for number, status in forks.ended(most):
                bucket = _received(folders[number], status, weights, left[number], empty)
                if bucket is None:  # perhaps no fork can do it
                    left = {number: left.pop(number), **left}
                    break
                shutil.rmtree(folders[number], ignore_errors=True)
                yield left.pop(number), bucket
    yield from ((job, build(job)) for job in left.values())


def _most(weights: SharedWeights) -> int:
    """How many forks there are processors and memory for."""
    needed = LEAST_BYTES + sum(x.nbytes for x in weights.known)
    return max(1, min(cores(), int(psutil.virtual_memory().available // needed)))


def _can_come_back(target) -> bool:
    """Whether the process can link and load what a fork has compiled."""
    is_cuda = target.kind.name == "cuda"
    # Both are kept, because a fork cannot ask a GPU.
    is_here = None not in (local_cuda_arch(), local_gpu_name()) if is_cuda else why_not_here(str(target)) is None
    return is_here and cc.get_cc() is not None


def _send(build: Callable[[Any], Bucket], job, folder: Path, weights: SharedWeights) -> None:
    """In a fork: build an engine, and write what `_received` reads, or why there is none."""
    folder.mkdir()
    known = {id(x): number for number, x in enumerate(weights.known)}
    try:
        bucket = build(job)
        engine = bucket.engine
        engine._export_library(str(folder / LIBRARY))
        # A view would be written with all of the tensor that it is of.
        sent = [
            known.get(id(x), x if x.untyped_storage().nbytes() == x.nbytes else x.clone())
            for x in engine._weights.tensors
        ]
        padded = replace(bucket.padded, program=None)
        parts = Parts(padded, engine._signature, engine._report, engine._mask_digests, engine._memory, sent)
        torch.save(parts, folder / PARTS)
    except Exception as error:
        is_clear = isinstance(error, StofError) and not isinstance(error, CompileError) and _is_picklable(error)
        torch.save(Failure(error if is_clear else None, traceback.format_exc()), folder / PARTS)


def _is_picklable(error: Exception) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False


def _received(folder: Path, status: int, weights: SharedWeights, job, empty) -> Bucket | None:
    """The bucket that a fork built; None if the process itself should try.

    Raises the error of the family that it raised, and CompileError for a fork that has ended otherwise.
    """
    if status:
        how = f"signal {-status}" if status < 0 else f"status {status}"
        raise CompileError(
            f"a process that compiled one of the range's sizes ended with {how}: is there enough memory, and "
            "room in the temporary folder? Fewer sizes (buckets=) or processors (taskset) need less"
        )
    with warnings.catch_warnings():
        # torch copies its own pytree specs in a way that it deprecates itself.
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        parts = torch.load(folder / PARTS, weights_only=False)  # our own file
    if isinstance(parts, Failure):
        if parts.error is not None:
            raise parts.error from RuntimeError(parts.lines)
        why = parts.lines.strip().splitlines()[-1]
        warnings.warn(f"sizes of the range are built one after another, because a fork could not: {why}", stacklevel=2)
        return None
    with without_noise():
        library, export = load_library(folder / LIBRARY), _KeptFile(folder / LIBRARY)
    # Their copies of what other forks made as well are let go.
    tensors = weights.shared([weights.known[x] if isinstance(x, int) else x for x in parts.weights])
    engine = Engine(library, export, parts.signature, parts.report, parts.mask_digests, parts.memory, Weights(tensors))
    bucket = empty(job, parts.padded)
    bucket.engine = engine
    return bucket


class _KeptFile:
    """Writes a file again that is deleted by then: it stays on the disk while it is open, as it does while loaded."""

    def __init__(self, path: Path):
        self._file = open(path, "rb")
        weakref.finalize(self, self._file.close)

    def __call__(self, path) -> None:
        with open(path, "wb") as copy:
            # Each read says where: threads and forks that write it at the same time have one position in common.
            while data := os.pread(self._file.fileno(), CHUNK, copy.tell()):
                copy.write(data)
