"""Merging by log-sum-exp, against attention over all keys."""

import math

import torch

from stof_tvm.parallel.context.merge import merged


def test_parts_are_merged():
    torch.manual_seed(0)
    scores, v = torch.randn(1, 2, 5, 9), torch.randn(1, 2, 9, 4)
    scores[0, 0, 0, :4] = scores[0, 1, 1, 4:] = scores[0, 0, 2] = -math.inf  # rows of one part, and of none

    def attention(some):
        lse = scores[..., some].logsumexp(-1)
        return torch.softmax(scores[..., some], -1).nan_to_num(0.0) @ v[..., some, :], lse

    out, lse = merged(attention(slice(0, 4)), attention(slice(4, 9)))
    expected, expected_lse = attention(slice(0, 9))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert not out[0, 0, 2].any() and lse[0, 0, 2] == -math.inf
