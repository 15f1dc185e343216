"""The note that the builder leaves beside each library, so that the runner knows what it computes."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import cloudpickle

from tir_kernels.template import KernelConfig

LIBRARY = "kernel.so"
NOTE = "job.pickle"
MASKS = "masks"  # a folder of pickled masks, by digest
REASON_LENGTH = 400


@dataclass(frozen=True)
class KernelJob:
    """A template's kernel in a configuration, for a target in JSON.

    `mask` is the digest of an attention's mask in the folder `MASKS`.
    """

    template: str
    problem: object
    config: KernelConfig | None
    mask: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class ScheduleJob:
    """A scheduled PrimFunc: (shape, dtype) of its arguments, and the library of its default schedule."""

    arguments: tuple[tuple[tuple[int, ...], str], ...]
    reference: str


def write_note(folder: Path, job: KernelJob | ScheduleJob) -> None:
    Path(folder, NOTE).write_bytes(cloudpickle.dumps(job))  # a configuration may be of a user's own class


def read_note(folder: Path) -> KernelJob | ScheduleJob:
    return pickle.loads(Path(folder, NOTE).read_bytes())


def keep_mask(folder: Path, digest: str, mask) -> None:
    """Write a mask where the measuring processes find it."""
    path = Path(folder, MASKS, digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(cloudpickle.dumps(mask))  # masks hold functions


def load_mask(folder: Path, digest: str):
    return pickle.loads(Path(folder, MASKS, digest).read_bytes())


def short_reason(error: Exception) -> str:
    """An exception in one line: its type, and the last line of its message."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[-1]}"[:REASON_LENGTH]
