"""Memory over many masks, as a serving loop's documents are: what caches hold is bounded."""

import gc
from pathlib import Path

import torch

import stof_tvm
from stof_tvm import attention, masks
from stof_tvm.masks import compilation
from tests.robustness.conftest import count

LENGTH = 256
CALLS, WARM_UP = count(60, 10_000), count(60, 600)
GROWTH = 4 << 20  # bytes that allocators may still take after the warm-up
HELD = 256 << 10  # bytes for each cache, so that the warm-up fills them


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_stays_flat_over_many_masks(monkeypatch):
    """Bool tensors, functions that captured one, and documents; each is another one."""
    for cache in (attention._plans, compilation._cache):
        cache.clear()
        monkeypatch.setattr(cache, "most_bytes", HELD)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 1, LENGTH, 8, generator=generator)
    recent = []

    def call(number: int) -> None:
        dense = torch.rand(LENGTH, LENGTH, generator=generator) < 0.5
        if number % 3 == 0:
            mask = dense
        elif number % 3 == 1:
            mask = lambda b, h, i, j: dense[i, j]
        else:
            lengths = [1 + number % 97, LENGTH - 1 - number % 97]
            mask = masks.document(lengths) & masks.from_tensor(dense)
        stof_tvm.sparse_attention(q, q, q, mask)
        recent.append(dense)
        del recent[:-3]

    for number in range(WARM_UP):
        call(number)
    before = resident()
    for number in range(WARM_UP, WARM_UP + CALLS):
        call(number)
    assert attention._plans.bytes <= HELD and compilation._cache.bytes <= HELD
    assert resident() - before < GROWTH
