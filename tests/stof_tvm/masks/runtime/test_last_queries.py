"""The weights of the last queries by key and by distance: the ways of summing diagonals, and keys in parts."""

import shutil

import pytest
import torch

from stof_tvm.masks.runtime import last_queries
from tests.stof_tvm.masks.runtime.emulated_gpu import use_emulated_gpu


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
@pytest.mark.parametrize("length, last", [(50, 8), (64, 64), (9, 1), (7, 7), (130, 64)])
def test_sums_of_a_gpu_are_those_of_a_cpu(length, last, monkeypatch, tmp_path):
    """NaN where a CPU has it, too."""
    torch.manual_seed(length)
    q, k = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16)
    k[0, 1, 3, 3], q[1, 1, -1, 0] = torch.inf, torch.nan
    expected = last_queries.sums_of_last(q, k, last)
    assert use_emulated_gpu(monkeypatch, tmp_path) == []
    for got, sums in zip(last_queries.sums_of_last(q, k, last), expected):
        torch.testing.assert_close(got, sums, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("length, last", [(50, 8), (64, 64), (9, 1), (7, 7), (130, 16), (129, 64), (640, 3)])
def test_keys_in_parts(length, last, on_gpu, monkeypatch):
    """Parts of many keys and of no more than there are rows; a last part of fewer keys than rows."""
    torch.manual_seed(length)
    q, k = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16)
    expected = last_queries.sums_of_last(q, k, last)
    monkeypatch.setattr(last_queries, "is_on_gpu", lambda weights: on_gpu)
    for held in (0, 8 * 8 * last * 20, 8 * 8 * last * length):
        monkeypatch.setattr(last_queries, "HELD", min(held, 2 * last * length - 1))
        for got, sums in zip(last_queries.sums_of_last(q, k, last), expected):
            torch.testing.assert_close(got, sums, rtol=1e-5, atol=1e-6)


def test_scores_of_many_keys_are_never_there_at_once(monkeypatch):
    """NaN and infinities are where they are without parts; no tensor has all scores."""
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 1, 300, 16)
    k[0, 0, 7, 3], q[0, 1, -2, 0] = torch.inf, torch.nan
    expected = last_queries.sums_of_last(q, k, 8)
    monkeypatch.setattr(last_queries, "HELD", 1000)
    sizes, scores = [], last_queries._scores
    monkeypatch.setattr(last_queries, "_scores", lambda *args: sizes.append(args[1].shape[2]) or scores(*args))
    found = last_queries.sums_of_last(q, k, 8)
    assert max(sizes) == 8 and len(sizes) == 2 * 38
    for got, sums in zip(found, expected):
        assert torch.equal(got.isnan(), sums.isnan())
