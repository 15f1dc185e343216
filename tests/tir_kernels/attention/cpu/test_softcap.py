"""Scores capped by tanh: CPU attention kernels against the float64 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.reference import attention_reference

PROBLEM = AttentionProblem(2, 4, 2, 37, 203, 24, 20, "float32", 1.0, gives_lse=True, softcap=4.0)
LONG = replace(PROBLEM, batch=1, q_len=3, kv_len=1100)  # few rows and many keys: the row-wise kernel splits them


def some(problem) -> np.ndarray:
    keep = np.random.default_rng(1).random((problem.q_len, problem.kv_len)) < 0.3
    keep[1] = False
    return keep


def causal(problem) -> np.ndarray:
    return np.tri(problem.q_len, problem.kv_len, problem.kv_len - problem.q_len, dtype=bool)


@pytest.mark.parametrize(
    "problem, mask",
    [
        (PROBLEM, some),
        (PROBLEM, causal),
        (LONG, some),
        (replace(PROBLEM, scale=-0.7), some),
        (replace(PROBLEM, dtype="float16"), causal),
        (replace(PROBLEM, dtype="bfloat16"), some),
        (replace(PROBLEM, bias_shape=(1, 4, 37, 203)), some),
        (replace(PROBLEM, bias_shape=(2, 1, 1, 203), dtype="bfloat16", bias_dtype="bfloat16"), causal),
        (replace(LONG, bias_shape=(1, 1, 1, 1100), bias_dtype="float16"), some),
        (replace(LONG, sink_dtype="float32", softcap=50), some),
    ],
    ids=["plain", "causal", "split", "negative scale", "half", "bfloat16", "bias", "key bias", "bias, split", "sink"],
)
def test_scores_are_capped_before_the_bias(template, run_kernel, make_operands, problem, mask):
    q, k, v = make_operands(problem)
    keep, given, arguments = mask(problem), [], {}
    if problem.bias_shape is not None:
        bias = torch.from_numpy(np.random.default_rng(3).normal(0, 2, problem.bias_shape).astype("float32"))
        bias[..., 7] = torch.finfo(torch.float16).min
        given.append(bias.to(getattr(torch, problem.bias_dtype)))
        arguments["bias"] = given[-1].double().numpy()
    if problem.sink_dtype is not None:
        given.append(torch.tensor([0.5, 60.0, -torch.inf, -3.0]))
        arguments["sink"] = given[-1].double().numpy()
    out, lse = (x.double().numpy() for x in run_kernel(template, problem, keep, [q, k, v, *given]))
    inputs = [x.double().numpy() for x in (q, k, v)]
    expected, expected_lse = attention_reference(problem, *inputs, keep, **arguments)
    tolerance = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}[problem.dtype]
    np.testing.assert_allclose(out, expected, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=1e-6)
    assert out[:, :, 1].any() == keep[1].any()
    plain, _ = attention_reference(replace(problem, softcap=None), *inputs, keep, **arguments)
    assert abs(plain - expected).max() > 0.05, "the cap matters here"


@pytest.mark.parametrize("softcap", [1e-30, 1e30])
def test_extreme_caps(template, run_kernel, make_operands, softcap):
    """A tiny one makes all scores equal; a huge one changes nothing."""
    problem = replace(PROBLEM, softcap=softcap, gives_lse=False)
    q, k, v = make_operands(problem)
    keep = some(problem)
    out = run_kernel(template, problem, keep, [q, k, v])
    expected = attention_reference(replace(problem, softcap=None, scale=1.0 * (softcap > 1)), q, k, v, keep)
    np.testing.assert_allclose(out.numpy(), expected, atol=2e-5)


def test_infinite_products_are_capped(template, run_kernel, make_operands):
    """A product that overflows has the cap as its score; one that is NaN makes its row NaN, and no other."""
    problem = replace(PROBLEM, batch=1, gives_lse=False)
    q, k, v = make_operands(problem)
    q[..., 0], k[:, :, 5] = 1e30, 0.0
    k[:, :, 5, 0] = 1e30
    k[:, :, 6], k[:, :, 6, 0] = 0.0, -1e30
    keep = some(problem)
    keep[2:, 5:7] = True
    q[:, 1, 3] = torch.nan
    out = run_kernel(template, problem, keep, [q, k, v]).double().numpy()
    q[:, 1, 3] = 0.0
    expected = attention_reference(problem, *(x.double().numpy() for x in (q, k, v)), keep)
    assert np.isnan(out[:, 1, 3]).all()
    out[:, 1, 3] = expected[:, 1, 3] = 0
    np.testing.assert_allclose(out, expected, atol=2e-5)
