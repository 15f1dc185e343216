"""The lines of a model in the traceback of an error that its forward raised."""

import traceback
from pathlib import Path
from types import TracebackType

import torch
import tvm

import relax_passes
import stof_tvm
import tir_kernels

PACKAGES = torch, tvm, stof_tvm, relax_passes, tir_kernels
MACHINERY = tuple(str(Path(package.__path__[0])) for package in PACKAGES)


def only_model_lines(error: BaseException) -> str:
    """Drop all frames but the model's from an error's traceback; returns the model's line that raised.

    Returns "" and changes nothing if the traceback has no frame of the model: the exporter itself failed.
    """
    frames = []
    entry = error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith((*MACHINERY, "<")):
            frames.append(entry)
        entry = entry.tb_next
    if not frames:
        return ""
    kept: TracebackType | None = None
    for entry in reversed(frames):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = kept
    (last,) = traceback.extract_tb(kept)[-1:]
    return f"{last.filename}:{last.lineno}, in {last.name}: {last.line}"
