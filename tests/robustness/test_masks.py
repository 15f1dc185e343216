"""Memory over many masks, as a serving loop's documents are: what caches hold is bounded."""

import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.launches import planned
from stof_tvm.masks import compilation
from tests.robustness.conftest import count
from tests.robustness.test_sharing import resident

LENGTH = 256
CALLS, WARM_UP = count(60, 10_000), count(60, 600)
WINDOWS = 3  # of calls: what a call leaves behind grows in each of them, and what an allocator keeps does not
GROWTH = 512 << 10  # bytes; the tensors of a window are more than twice as many
HELD = 256 << 10  # bytes for each cache, so that the warm-up fills them


def test_memory_stays_flat_over_many_masks(monkeypatch):
    """Bool tensors, functions that captured one, and documents; each is another one."""
    for cache in (planned.plans, compilation._cache):
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
    grown = []
    for window in range(WINDOWS):
        before = resident()
        for number in range(CALLS // WINDOWS):
            call(WARM_UP + window * (CALLS // WINDOWS) + number)
        grown.append(resident() - before)
    assert planned.plans.bytes <= HELD and compilation._cache.bytes <= HELD
    assert min(grown) < GROWTH, grown
