"""Tensors that `torch.save` wrote, read without running what a file may hold."""

from pathlib import Path

import torch

from stof_tvm.masks.quality.weights import check_attention
from tir_kernels.errors import InputError

TURN = "if they are (batch, length, heads, size), save q.transpose(1, 2) and k.transpose(1, 2)"


def load_q_and_k(*paths: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The q and k of two files, (batch, heads, length, size); InputError where they are none of one attention."""
    q, k = map(load_tensor, paths)
    try:
        check_attention(q, k)
    except InputError as error:
        if q.ndim == k.ndim == 4 and _fit(q.transpose(1, 2), k.transpose(1, 2)):
            raise InputError(f"{error}; {TURN}") from None
        raise
    return q, k


def doubt(q: torch.Tensor, k: torch.Tensor) -> str | None:
    """Why a q and k that fit may have tokens before heads all the same; None where nothing says so."""
    heads, length = k.shape[1:3]
    return f"k has more heads ({heads}) than tokens ({length}); {TURN}" if heads > length else None


def _fit(q: torch.Tensor, k: torch.Tensor) -> bool:
    try:
        check_attention(q, k)
    except InputError:
        return False
    return True


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
