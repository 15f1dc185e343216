"""A batch of prompts as the engines take it: each sequence from position 0 on, what is missing behind it."""

import torch

from tir_kernels.errors import InputError


def checked_ids(ids, vocabulary: int, device: torch.device) -> torch.Tensor:
    """A batch of token numbers; InputError unless int64 (batch, tokens), on the device and in the vocabulary."""
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        given = f"{ids.dtype} {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InputError(f"ids must be an int64 tensor of shape (batch, tokens), got {given}")
    if ids.device.type != device.type or ids.device.index not in (None, device.index or 0):
        raise InputError(f"ids are on {ids.device}; the engines run on {device.type}:{device.index or 0}")
    lowest, highest = (int(x) for x in ids.aminmax())
    if lowest < 0 or highest >= vocabulary:
        wrong = lowest if lowest < 0 else highest
        raise InputError(f"ids must be from 0 to {vocabulary - 1}, the model's vocabulary; there is {wrong}")
    return ids


def check_padding(ids: torch.Tensor, attention_mask) -> None:
    """InputError unless `attention_mask`, of any dtype, has the shape of ids, (batch, tokens)."""
    shape = tuple(attention_mask.shape) if isinstance(attention_mask, torch.Tensor) else type(attention_mask).__name__
    if shape != tuple(ids.shape):
        raise InputError(f"attention_mask must have the shape of ids, {tuple(ids.shape)}, got {shape}")


def from_zero(ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, lengths) of a batch that is padded on the left: tokens moved to the front, int64 (batch,) their number.

    `attention_mask` is (batch, tokens), not 0 at tokens.  InputError for padding elsewhere, and for an empty sequence.
    """
    batch, tokens = ids.shape
    if attention_mask is None:
        return ids, torch.full((batch,), tokens, device=ids.device)
    check_padding(ids, attention_mask)
    kept = attention_mask.to(device=ids.device, dtype=torch.bool)
    lengths, place = kept.sum(1), torch.arange(tokens, device=ids.device)
    padding = tokens - lengths
    if not bool((kept == (place >= padding[:, None])).all()):
        raise InputError("attention_mask must be 0 on the left only: pad prompts with padding_side='left'")
    if bool((lengths == 0).any()):
        raise InputError("attention_mask is 0 in a whole sequence: a prompt has at least one token")
    return ids.gather(1, (place + padding[:, None]).clamp(max=tokens - 1)), lengths
