"""Eager attention with a mask of ours."""

import pytest
import torch
import torch.nn.functional as F

from stof_tvm import masks
from stof_tvm.cli.eager import MaskedSdpa, compare

Q, K, V = torch.randn(3, 1, 2, 24, 8, generator=torch.Generator().manual_seed(0))
KEEP = masks.sliding_window(5).dense(24)
OWN = torch.arange(24) < 20  # a padding mask


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, KEEP),
        ({"is_causal": True}, KEEP.tril()),
        ({"attn_mask": OWN}, KEEP & OWN),
        ({"attn_mask": torch.zeros(24).masked_fill(~OWN, float("-inf"))}, KEEP & OWN),
        ({"scale": 0.5}, KEEP),
    ],
)
def test_both_masks_hold(given, kept):
    sdpa = MaskedSdpa(masks.sliding_window(5))
    with sdpa:
        actual = F.scaled_dot_product_attention(Q, K, V, **given)
    kept = kept.clone()
    rest = {"scale": given["scale"]} if "scale" in given else {}
    expected = F.scaled_dot_product_attention(Q, K, V, kept, **rest)
    rows = kept.any(dim=1)  # PyTorch's own rows that keep nothing are 0 or NaN by back-end
    torch.testing.assert_close(actual[:, :, rows], expected[:, :, rows])
    assert sdpa.calls == 1


def test_pytorch_is_as_before():
    before, fast = F.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError), MaskedSdpa(masks.causal()):
        assert F.scaled_dot_product_attention != before and not torch.backends.mha.get_fastpath_enabled()
        raise RuntimeError
    assert F.scaled_dot_product_attention is before and torch.backends.mha.get_fastpath_enabled() == fast


def test_the_worst_tensor_counts():
    ones = torch.ones(3)
    assert compare((ones, ones), (ones, ones))["matches"]
    assert compare((ones, ones + 0.5), (ones, ones)) == {"matches": False, "error": 0.5, "largest": 1.0}
    assert compare({"a": ones * float("nan")}, {"a": ones}) == {"matches": False, "error": None, "largest": None}
    assert not compare(torch.tensor([1, 2]), torch.tensor([1, 3]))["matches"]
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 2]))["matches"]
