"""What a compared system offers to the benchmark."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


def as_given(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensors


@dataclass
class Prepared:
    """A system made ready for one case: compiled, its mask on the device.

    Attributes
    ----------
    call
        Takes q, k, v as `arrange` returns them and computes the attention; its time is what is measured.
    variant
        What ran, in a few words.
    arrange
        From q (B, H, Sq, D), k, v (B, Hkv, Skv, D) to the layout that the system is made for; not timed.
    restore
        From the call's result to (B, H, Sq, D); not timed.
    scheduled
        Share of all elements that the system computes, where it knows.
    """

    call: Callable[..., torch.Tensor]
    variant: str
    arrange: Callable[..., tuple[torch.Tensor, ...]] = as_given
    restore: Callable[[torch.Tensor], torch.Tensor] = lambda out: out
    scheduled: float | None = None
