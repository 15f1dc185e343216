"""Refusal of torch.autocast, which engines do not support."""

from collections.abc import Iterable

import torch

from tir_kernels.errors import UnsupportedError


def refuse_autocast(values: Iterable, to_do: str) -> None:
    """UnsupportedError where autocast is on for the device of a tensor in `values`; says what `to_do` outside of it."""
    for device in sorted({x.device.type for x in values if isinstance(x, torch.Tensor)}):
        if torch.is_autocast_enabled(device):
            raise UnsupportedError(
                "an engine computes in the dtypes of the model, not in those of torch.autocast: convert the model "
                f"(model.bfloat16()) and {to_do} outside of autocast"
            )
