"""The weights of the last queries by distance: the two ways of summing diagonals."""

import pytest
import torch

from stof_tvm.masks.runtime import last_queries


@pytest.mark.parametrize("length, last", [(50, 8), (64, 64), (9, 1), (7, 7), (130, 64)])
def test_diagonals_of_a_gpu_are_those_of_a_cpu(length, last, monkeypatch):
    torch.manual_seed(length)
    q, k = torch.randn(2, 4, length, 16), torch.randn(2, 2, length, 16)
    expected = last_queries.sums_of_last(q, k, last)
    monkeypatch.setattr(last_queries, "is_on_gpu", lambda weights: True)
    for got, sums in zip(last_queries.sums_of_last(q, k, last), expected):
        torch.testing.assert_close(got, sums, rtol=1e-5, atol=1e-6)
