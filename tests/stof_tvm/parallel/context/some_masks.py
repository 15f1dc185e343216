"""Masks of every kind that ranks share a sequence under, with the number of heads that tests give them."""

import numpy as np
import torch

from stof_tvm import masks

HEADS = 4


def documents(length: int) -> list[int]:
    """Lengths of documents that no block divides."""
    parts = [length // 4 + 3, length // 5 - 1, length // 7, length // 9 + 2]
    return [*parts, length - sum(parts)]


def some_masks(length: int) -> dict:
    """Masks by name for a length of at least 64."""
    random = torch.from_numpy(np.random.default_rng(0).random((HEADS, length, length)) < 0.01)
    by_head = [masks.causal(), masks.sliding_window(9), masks.strided(5), masks.document(documents(length))]
    return {
        "window and sinks": masks.a_shape(4, length // 8),
        "window and global rows": masks.sliding_window(length // 10) | masks.global_tokens([0, length // 2]),
        "causal": masks.causal(),
        "documents": masks.document(documents(length)),
        "causal documents": masks.document(documents(length)) & masks.causal(),
        "bigbird": masks.bigbird(block=16),
        "strided": masks.strided(7),
        "dilated": masks.dilated_window(9, 3),
        "padding": masks.padding([length // 3]),
        "random, by head": masks.from_tensor(random),
        "by head": masks.per_head(by_head),
    }
