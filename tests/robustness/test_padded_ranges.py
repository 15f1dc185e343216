"""Ranges whose inputs are padded, and batches without padding: memory over many calls of random lengths."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.conftest import count
from tests.robustness.test_sharing import resident

LONGEST, WIDTH = 24, 16
MOST_GROWTH = 4 << 20  # bytes, of which allocators keep some; a result kept by each call would be more
CALLS = count(3_000, 10_000)


class Encoder(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.qkv = nn.Embedding(50, width), nn.Linear(width, 3 * width)

    def forward(self, ids, attention_mask=None):
        q, k, v = self.qkv(self.words(ids)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        keep = None if attention_mask is None else (attention_mask == 1)[:, None, None, :]
        return nn.functional.scaled_dot_product_attention(q, k, v, keep).transpose(1, 2).flatten(2)


def ranged():
    """A call of an engine of a range of lengths."""
    dims = {"ids": {0: Dim("batch", max=4), 1: Dim("length", max=LONGEST)}}
    ids = torch.ones(2, 9, dtype=torch.int64)
    engine = stof_tvm.build(Encoder().eval(), QUICK_LLVM, (ids,), dynamic_shapes=dims, buckets={"length": [8, LONGEST]})
    return lambda lengths: engine(torch.ones(len(lengths), max(lengths), dtype=torch.int64))


def packed():
    """A call of an engine without padding."""
    ids = torch.ones(2, LONGEST, dtype=torch.int64)
    engine = stof_tvm.build(Encoder().eval(), QUICK_LLVM, (ids, torch.ones_like(ids)), without_padding=True)

    def call(lengths):
        ids = torch.ones(len(lengths), max(lengths), dtype=torch.int64)
        return engine(ids, attention_mask=(torch.arange(ids.shape[1]) < torch.tensor(lengths)[:, None]).long())

    return call


@pytest.mark.slow
@pytest.mark.parametrize("make", [ranged, packed])
def test_memory_stays_as_it_is(make):
    call, numbers = make(), torch.Generator().manual_seed(0)
    batches = [torch.randint(1, LONGEST + 1, (1 + n % 4,), generator=numbers).tolist() for n in range(500)]
    for lengths in [[LONGEST] * 4, *batches]:  # every size, and as many masks as are kept
        call(lengths)
    before = resident()
    for number in range(CALLS):
        call(batches[number % len(batches)])
    assert resident() - before < MOST_GROWTH
