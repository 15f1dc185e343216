"""The kernels of `vertical_slash`, emulated, beside what it computes by PyTorch's operators."""

import shutil

import pytest
import torch

from stof_tvm import masks
from tests.stof_tvm.masks.runtime.emulated_gpu import RULE, use_emulated_gpu
from tir_kernels.selection.last_weights import normalizers, sums
from tir_kernels.selection.vertical_slash_map import vertical_slash_map

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def tensors(length):
    torch.manual_seed(length)
    return torch.randn(2, 4, length, 16) * 2, torch.randn(2, 2, length, 16)


@pytest.mark.parametrize("block", [32, (128, 32), (64, 128), (16, 32)])
def test_maps_are_those_of_a_cpu(block, monkeypatch, tmp_path):
    """Also where nothing but what is forced is chosen, or more than there is, and of some rows."""
    counts = [(9, 12, 2, 4), (0, 0, 0, 0), (3, 2, 8, 40), (4, 500, 0, 1), (2, 3, 999, 0)]
    rules = [masks.runtime.vertical_slash(a, b, 16, c, d, block) for a, b, c, d in counts]
    cases = [(rule, tensors(length)) for rule in rules for length in (5, 200, 256)]
    expected = [rule.block_map(*given) for rule, given in cases]
    called = use_emulated_gpu(monkeypatch, tmp_path)
    for (rule, given), found in zip(cases, expected):
        assert torch.equal(rule.block_map(*given), found)
        rows = rule.maps_of_rows(*given)
        for first in range(found.shape[2]):
            assert torch.equal(rows(first, first + 1), found[:, :, first : first + 1])
    assert set(called) == {normalizers, sums, vertical_slash_map}


@pytest.mark.parametrize("block", [32, (16, 32)])
def test_what_is_always_chosen_is_kept_beside_nan_and_infinity(block, monkeypatch, tmp_path):
    use_emulated_gpu(monkeypatch, tmp_path)
    rule = masks.runtime.vertical_slash(6, 6, last=8, sinks=2, window=4, block=block)
    nearest = masks.runtime.vertical_slash(0, 0, last=8, sinks=2, window=4, block=block)
    for place in (-3, 20):
        q, k = tensors(150)
        k[:, :, place] = torch.nan
        q[:, :, -1, 0] = torch.inf
        always = nearest.block_map(q, k)
        assert torch.equal(rule.block_map(q, k) & always, always) and always[..., 0].all()


def test_blocks_without_a_kernel(monkeypatch, tmp_path):
    q, k = tensors(200)
    rule = masks.runtime.vertical_slash(9, 12, last=16, sinks=2, window=4, block=(16, 32))
    expected = rule.block_map(q, k)
    called = use_emulated_gpu(monkeypatch, tmp_path)
    monkeypatch.setattr(RULE, "takes", lambda block: False)
    assert torch.equal(rule.block_map(q, k), expected) and set(called) == {normalizers, sums}
