"""Which GPU an engine is on, and that calls run on it, whichever one is the caller's current GPU.

A kernel is launched on the current GPU, and TVM makes a tensor's GPU the current one without making the caller's the
current one again.
"""

import contextlib
from contextlib import AbstractContextManager

import torch
from torch.utils import _pytree as pytree

from tir_kernels.errors import InputError


def current_gpu() -> int:
    """The number of this thread's current GPU; 0 in a process that has not used any, and without one."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def current_device(kind: str) -> torch.device:
    """Where an engine is whose tensors do not say which GPU; `kind` is "cuda" or that of a CPU."""
    return torch.device("cuda", current_gpu()) if kind == "cuda" else torch.device("cpu")


def on_gpu(index: int | None) -> AbstractContextManager:
    """A context in which the GPU of this number is the current one; nothing happens for None and without GPUs.

    A process that has not used a GPU stays one that has not, as a compiler for other machines: its current one is 0.
    """
    is_current = index == 0 and not torch.cuda.is_initialized()
    stays = index is None or is_current or not torch.cuda.is_available()
    return contextlib.nullcontext() if stays else torch.cuda.device(index)


def gpu_of(model, *inputs) -> int | None:
    """The number of the GPU that an engine of a model is to be on; None if its tensors do not say.

    It is that of the example inputs, or where they are on none, that of the model's tensors, if these are on one alone.
    An exported program has example inputs of its own, which count where none are given on a GPU.  Raises InputError for
    example inputs on several.
    """
    held: list = []
    given = _gpus(pytree.tree_leaves(inputs))
    if isinstance(model, torch.export.ExportedProgram):
        given = given or _gpus(pytree.tree_leaves(model.example_inputs))
        held = [*model.state_dict.values(), *model.constants.values()]
    elif isinstance(model, torch.nn.Module):
        held = [*torch.nn.Module.parameters(model), *torch.nn.Module.buffers(model)]  # a model may use these names
    if len(given) > 1:
        where = " and ".join(f"cuda:{index}" for index in sorted(given))
        raise InputError(f"the example inputs are on {where}; an engine is on one GPU: move them to one")
    found = given or _gpus(held)
    return found.pop() if len(found) == 1 else None


def _gpus(values) -> set[int]:
    """The numbers of GPUs that there are, and that tensors are on."""
    on = {x.device.index for x in values if isinstance(x, torch.Tensor) and x.device.type == "cuda"}
    return {index for index in on if index is not None and index < torch.cuda.device_count()}
