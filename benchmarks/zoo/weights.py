"""Seeded weights at the cost of a copy: billions of random numbers are not drawn, a pool of them is repeated."""

import functools

import torch
from torch import nn

POOL = 16_777_213  # a prime, so that rows of a weight do not repeat
STD = 0.02


def fill(model: nn.Module) -> None:
    """Overwrite every parameter: norms and scales leave values as they are, all else is normal; buffers stay."""
    start, seen = 0, set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            constant = _constant(module, name, parameter)
            if constant is None:
                start = _copy(parameter.data.view(-1), start)
            else:
                parameter.data.fill_(constant)


def _constant(module: nn.Module, name: str, parameter: torch.Tensor) -> float | None:
    """The value of a parameter that is no random one: norms' weights, layers' scales, norms of normed weights."""
    if name == "weight" and parameter.ndim == 1:
        return 0.0 if type(module).__name__.startswith("Gemma") else 1.0  # Gemma adds 1
    return 1.0 if name.startswith("lambda") or name == "original0" else None


def _copy(flat: torch.Tensor, start: int) -> int:
    """Fill a vector from the pool, beginning at `start`; where the next one begins."""
    pool, done = _pool(), 0
    while done < len(flat):
        count = min(len(flat) - done, POOL - start)
        flat[done : done + count] = pool[start : start + count]
        done, start = done + count, (start + count) % POOL
    return start


@functools.cache
def _pool() -> torch.Tensor:
    return (torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * STD).half()
