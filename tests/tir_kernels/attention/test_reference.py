"""The NumPy reference against PyTorch's attention in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.errors import InputError


def operands(problem):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(problem.shape(x), dtype=torch.float64, generator=generator) for x in "qkv"]


def test_equals_pytorch_with_mask_scale_and_groups():
    problem = AttentionProblem(2, 4, 2, 11, 13, 8, 6, "float32", 0.3)
    q, k, v = operands(problem)
    keep = torch.rand(2, 4, 11, 13, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[:, :, 3] = False
    expected = F.scaled_dot_product_attention(q, k, v, keep, scale=0.3, enable_gqa=True)
    got = attention_reference(problem, q, k, v, keep)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    assert not got[:, :, 3].any()


def test_equals_pytorch_with_a_float_mask():
    problem = AttentionProblem(2, 4, 4, 11, 13, 8, 8, "float32", 0.3, bias_shape=(1, 4, 11, 13))
    q, k, v = operands(problem)
    bias = torch.randn(1, 4, 11, 13, generator=torch.Generator().manual_seed(2))
    bias[0, 0, 0, :5] = float("-inf")
    expected = F.scaled_dot_product_attention(q, k, v, bias.double(), scale=0.3)
    got = attention_reference(problem, q, k, v, np.True_, bias)
    np.testing.assert_allclose(got, expected, atol=1e-6)  # scores beside a bias are float32


def test_a_row_of_finfo_min_averages():
    problem = AttentionProblem(1, 1, 1, 2, 5, 4, 4, "float32", 1.0, bias_shape=(1, 1, 1, 1))
    q, k, v = operands(problem)
    got = attention_reference(problem, q, k, v, np.True_, np.full((1, 1, 1, 1), np.finfo(np.float32).min))
    np.testing.assert_allclose(got[0, 0], np.broadcast_to(v[0, 0].mean(dim=0), (2, 4)))


def test_layouts_are_those_of_the_problem():
    plain = AttentionProblem(2, 4, 2, 11, 13, 8, 6, "float32", 0.3)
    q, k, v = operands(plain)
    keep = np.tri(11, 13, dtype=bool)
    swapped = AttentionProblem(2, 4, 2, 11, 13, 8, 6, "float32", 0.3, layouts=Layouts("bshd", "bhsd", "bshd", "bshd"))
    got = attention_reference(swapped, q.transpose(1, 2), k, v.transpose(1, 2), keep)
    np.testing.assert_array_equal(got.swapaxes(1, 2), attention_reference(plain, q, k, v, keep))


def test_views_are_the_strided_tensors_of_torch():
    packed = torch.randn(2, 11, 3, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    plain = AttentionProblem(2, 4, 4, 11, 11, 8, 8, "float32", 0.3)
    views = (View(packed.numel(), x.storage_offset(), *x.stride()[:3]) for x in (q, k, v))
    viewed = AttentionProblem(2, 4, 4, 11, 11, 8, 8, "float32", 0.3, layouts=Layouts(*views))
    keep = np.tri(11, 11, dtype=bool)
    flat = packed.reshape(-1)
    got = attention_reference(viewed, flat, flat, flat, keep)
    np.testing.assert_array_equal(got, attention_reference(plain, q, k, v, keep))


def test_a_sink_is_one_more_key_whose_value_is_0():
    problem = AttentionProblem(2, 4, 2, 11, 13, 8, 6, "float32", 0.3, gives_lse=True, sink_dtype="float32")
    q, k, v = operands(problem)
    sink = torch.tensor([0.5, 300.0, -torch.inf, -2.0], dtype=torch.float64)
    keep = torch.rand(2, 4, 11, 13, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[:, :, 3] = False
    scores = (0.3 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~keep, -torch.inf)
    scores = torch.cat([scores, sink[:, None, None].expand(2, 4, 11, 1)], dim=-1)
    expected = scores.softmax(-1).nan_to_num()[..., :13] @ v.repeat_interleave(2, 1)
    out, lse = attention_reference(problem, q, k, v, keep, sink=sink)
    np.testing.assert_allclose(out, expected, atol=1e-12)
    np.testing.assert_allclose(lse, scores.logsumexp(-1), atol=1e-12)


def test_a_sink_that_is_no_number_makes_its_head_none():
    problem = AttentionProblem(1, 3, 3, 2, 5, 4, 4, "float32", 1.0, sink_dtype="float32")
    q, k, v = operands(problem)
    with np.errstate(invalid="ignore"):
        out = attention_reference(problem, q, k, v, np.True_, sink=np.array([np.nan, np.inf, 0.0]))
    assert np.isnan(out[0, :2]).all() and np.isfinite(out[0, 2]).all()


@pytest.mark.parametrize("bias_shape", [None, (1, 4, 11, 13)])
def test_a_softcap_bounds_scores_before_the_bias(bias_shape):
    problem = AttentionProblem(2, 4, 4, 11, 13, 8, 8, "float32", -0.7, bias_shape, gives_lse=True, softcap=1.5)
    q, k, v = operands(problem)
    bias = None if bias_shape is None else torch.randn(bias_shape, generator=torch.Generator().manual_seed(2))
    keep = torch.rand(2, 4, 11, 13, generator=torch.Generator().manual_seed(1)) < 0.6
    keep[:, :, 3] = False
    scores = 1.5 * torch.tanh(-0.7 * q @ k.mT / 1.5)
    scores = (scores if bias is None else scores + bias).masked_fill(~keep, -torch.inf)
    out, lse = attention_reference(problem, q, k, v, keep, bias)
    np.testing.assert_allclose(out, scores.softmax(-1).nan_to_num() @ v, atol=1e-6)
    np.testing.assert_allclose(lse, scores.logsumexp(-1), atol=1e-6)


@pytest.mark.parametrize("softcap", [0, 0.0, -5.0, float("inf"), float("nan"), 1e39, 1e-39, True])
def test_a_softcap_is_positive_and_finite(softcap):
    with pytest.raises(InputError, match="softcap=.* must be a positive, finite float32"):
        AttentionProblem(1, 1, 1, 2, 5, 4, 4, "float32", 1.0, softcap=softcap)


def test_the_scale_over_the_softcap_is_finite():
    with pytest.raises(InputError, match="over softcap=1e-20 is no finite float32"):
        AttentionProblem(1, 1, 1, 2, 5, 4, 4, "float32", 1e30, softcap=1e-20)
