"""Prompts of a batch in parts: some sequences after others, so that an engine for prompts does not grow with the batch.

A GPU is busy with some ten thousand tokens already.  With all prompts at once a call's memory would grow with the
batch, and its largest tensors would reach 2^31 elements, which fused kernels do not take.
"""

from collections.abc import Callable

import torch

MOST_TOKENS = 1 << 16  # of the prompts of a part: times 32,767 features they are less than 2^31 elements


def in_parts(call: Callable, ids: torch.Tensor, lengths: torch.Tensor, part: int) -> torch.Tensor:
    """Logits (batch, vocabulary) after all prompts, `part` of them at a time.

    The last part overlaps the one before where `part` does not divide the batch: every call has the same shapes, and
    to compute a prompt again changes nothing.

    Parameters
    ----------
    call : callable
        `call(ids, lengths, first)` is what a Decoder computes; its result need only hold until the next call.
    ids : torch.Tensor
        int64 (batch, tokens).
    lengths : torch.Tensor
        int64 (batch,).
    part : int
        From 1 to the batch.
    """
    batch = len(ids)
    if part == batch:
        return call(ids, lengths, ids.new_zeros(1))
    logits = None
    for begin in range(0, batch, part):
        first = min(begin, batch - part)
        rows = slice(first, first + part)
        found = call(ids[rows], lengths[rows], ids.new_full((1,), first))
        if logits is None:
            logits = found.new_empty(batch, found.shape[1])
        logits[rows] = found
    assert logits is not None
    return logits
