"""Tensors that `torch.save` wrote, read without running what a file may hold."""

from pathlib import Path

import torch

from tir_kernels.errors import InputError


def load_tensor(path: Path) -> torch.Tensor:
    """The tensor of a file, on the CPU; InputError where there is none, or the file holds anything else."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(f"the tensor {path} cannot be read: {error.strerror or error}") from None
    except Exception as error:  # zip, pickle and torch each have errors of their own for damage
        first = (str(error).splitlines() or [""])[0][:200]
        raise InputError(f"{path} holds no tensor that torch.save wrote: {type(error).__name__}: {first}") from None
    if not isinstance(found, torch.Tensor) or found.is_sparse or found.is_quantized:
        raise InputError(f"{path} must hold one dense tensor, it holds a {type(found).__name__}")
    return found
