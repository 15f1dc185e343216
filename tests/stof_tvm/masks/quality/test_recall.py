"""Kept softmax mass against dense weights, for grouped heads, parts of rows, and masks within masks."""

import pytest
import torch

from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError
from stof_tvm.masks.quality import weights

torch.manual_seed(0)
Q, K = torch.randn(2, 4, 37, 16), torch.randn(2, 2, 53, 16)


def expected(keep, q=Q, k=K, scale=0.25, within=None, rows=None):
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("bhid,bhjd->bhij", q.double(), k) * scale
    if within is not None:
        scores = scores.masked_fill(~within, -torch.inf)
    weights = scores.softmax(-1)
    mass = torch.where(keep, weights, 0.0).sum(-1)
    mass = mass if rows is None else mass[:, :, rows]
    return mass.nanmean(-1)


@pytest.mark.parametrize("chunk", [1 << 23, 900])
def test_heads(monkeypatch, chunk):
    monkeypatch.setattr(weights, "CHUNK_ELEMENTS", chunk)
    mask = masks.sliding_window(6) | masks.global_tokens(2)
    found = masks.recall(mask, Q, K)
    torch.testing.assert_close(found.heads, expected(mask.dense(37, 53)), rtol=1e-5, atol=1e-6)
    assert found.mean == pytest.approx(found.heads.mean().item()) and 0 < found.mean < 1
    by_head = masks.per_head([masks.sliding_window(n) for n in (0, 3, 9, 60)]) & masks.padding([50, 20])
    found = masks.recall(by_head, Q, K, scale=1.5)
    torch.testing.assert_close(found.heads, expected(by_head.dense(37, 53), scale=1.5), rtol=1e-5, atol=1e-6)


def test_within_another_mask():
    near, causal = masks.sliding_window(6), masks.causal()
    k = Q + 0.1 * torch.randn_like(Q)
    found = masks.recall(near, Q, k, within=causal)
    torch.testing.assert_close(
        found.heads, expected(near.dense(37), Q, k, within=causal.dense(37)), rtol=1e-5, atol=1e-6
    )
    assert masks.recall(causal, Q, k, within=causal).mean == pytest.approx(1)
    # Rows of which nothing is the whole do not count, and weights outside of it do not matter, however large.
    part = torch.ones(37, 37, dtype=torch.bool).tril(-1)
    loud = k.clone()
    loud[:, :, -1] = 1000 * Q[:, :, 5]
    found = masks.recall(near, Q, loud, within=part)
    torch.testing.assert_close(found.heads, expected(near.dense(37), Q, loud, within=part), rtol=1e-5, atol=1e-6)
    assert masks.recall(near, Q, k, within=torch.zeros(37, 37, dtype=torch.bool)).mean == 1


def test_some_rows():
    mask = masks.sliding_window(6)
    found = masks.recall(mask, Q, K, rows=5)
    torch.testing.assert_close(found.heads, expected(mask.dense(37, 53), rows=[0, 7, 14, 22, 29]), rtol=1e-5, atol=1e-6)
    assert torch.equal(masks.recall(mask, Q, K, rows=100).heads, masks.recall(mask, Q, K).heads)


def test_nan_is_no_recall():
    q = Q.clone()
    q[0, 1, 3] = torch.nan
    found = masks.recall(masks.sliding_window(3), q, K)
    assert found.heads.isnan().nonzero().tolist() == [[0, 1]] and found.mean != found.mean


def test_everything_and_half_precision():
    assert masks.recall(masks.sliding_window(99), Q, K).mean == pytest.approx(1)
    assert masks.recall(~masks.sliding_window(99), Q, K).mean == 0
    mask = masks.dilated_window(5, 3)
    half = masks.recall(mask, Q.bfloat16(), K.bfloat16())
    assert half.mean == pytest.approx(masks.recall(mask, Q, K).mean, abs=0.01)
    assert torch.equal(masks.recall(mask.dense(37, 53), Q, K).heads, masks.recall(mask, Q, K).heads)


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (lambda: masks.recall("causal", Q, K), MaskError, "mask must be a Mask or a bool tensor .*, got str"),
        (lambda: masks.recall(torch.ones(37, 53), Q, K), MaskError, r"got torch.float32 tensor \(37, 53\)"),
        (lambda: masks.recall(masks.causal(), Q, K, within=3), MaskError, "within must be a Mask"),
        (lambda: masks.recall(masks.causal(), Q[0], K), InputError, r"q must be a floating-point tensor of shape"),
        (
            lambda: masks.recall(masks.causal(), Q, K.int()),
            InputError,
            r"k must be .*, got torch.int32 \(2, 2, 53, 16\)",
        ),
        (lambda: masks.recall(masks.causal(), Q[:, :3], K), InputError, "a multiple of k's heads"),
        (lambda: masks.recall(masks.causal(), Q, K[:1]), InputError, "must have one batch and head size"),
        (lambda: masks.recall(masks.causal(), Q, K, rows=0), MaskError, "rows=0 must be an integer of at least 1"),
        (lambda: masks.recall(masks.per_head([masks.causal()] * 3), Q, K), MaskError, r"\(1, 3\), which does not"),
        (lambda: masks.recall(masks.document([3]), Q, K), MaskError, "document lengths sum to 3"),
    ],
)
def test_what_does_not_fit(call, error, why):
    with pytest.raises(error, match=why):
        call()


def test_no_whole_array_is_held():
    import tracemalloc

    q = torch.randn(1, 1, 6000, 8)
    tracemalloc.start()
    masks.recall(masks.sliding_window(50), q, q, rows=64)
    peak = tracemalloc.get_traced_memory()[1]  # of NumPy: rows of the mask
    tracemalloc.stop()
    assert peak < 6000 * 6000 / 4
