"""Large buffers whose entries are the same: one entry is copied, and engines, resets and files have all of them."""

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm.frontend import states
from stof_tvm.generation import decoder
from tests.models.quick_llvm import QUICK_LLVM


class Cache(nn.Module):
    def __init__(self, rows: torch.Tensor):
        super().__init__()
        self.register_buffer("rows", rows)

    def forward(self, at, new):
        self.rows.index_copy_(1, at, new)
        return self.rows * 2


@pytest.mark.parametrize("differs", [False, True])
def test_a_state_begins_with_the_buffer(differs, monkeypatch, tmp_path):
    monkeypatch.setattr(states, "LARGE", 4)
    rows = torch.arange(8.0).view(1, 4, 2).repeat(3, 1, 1)
    rows[2, 3, 1] += differs
    engine = stof_tvm.build(Cache(rows.clone()), QUICK_LLVM, (torch.tensor([1]), torch.ones(3, 1, 2)))
    assert [x.stride(0) == 0 for x in engine._initial] == [not differs]
    engine.save(tmp_path / "cache.stof")
    for one in (engine, stof_tvm.load(tmp_path / "cache.stof")):
        for at in (1, 2):
            one.reset_state()
            assert torch.equal(one.state["rows"], rows)
            expected = rows.clone()
            expected[:, at] = -1
            assert torch.equal(one(torch.tensor([at]), torch.full((3, 1, 2), -1.0)), expected * 2)


def test_noise_of_large_caches(monkeypatch):
    """Its entries are the same, and neither its tokens nor its heads are."""
    monkeypatch.setattr(decoder, "MOST_NOISE", 100)
    monkeypatch.setattr(decoder, "PERIOD", 31)
    found = decoder._noise((3, 2, 10, 4), torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
    assert found.shape == (3, 2, 10, 4) and found.is_contiguous()
    assert torch.equal(found, found[:1].expand_as(found))
    assert len({tuple(row.tolist()) for row in found[0].reshape(-1, 4)}) == 20
