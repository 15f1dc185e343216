"""A sink in the softmax's denominator: CPU attention kernels against the float64 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.reference import attention_reference

SINK = torch.tensor([0.5, 60.0, -torch.inf, -3.0])
PROBLEM = AttentionProblem(2, 4, 2, 37, 203, 24, 20, "float32", 0.2, gives_lse=True, sink_dtype="float32")
LONG = replace(PROBLEM, batch=1, q_len=3, kv_len=1100)  # few rows and many keys: the row-wise kernel splits them


def some(problem) -> np.ndarray:
    keep = np.random.default_rng(1).random((problem.q_len, problem.kv_len)) < 0.3
    keep[1] = False
    return keep


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        LONG,
        replace(PROBLEM, scale=-0.2, sink_dtype="bfloat16"),
        replace(PROBLEM, dtype="float16", sink_dtype="float16"),
        replace(PROBLEM, bias_shape=(1, 4, 37, 203)),
        replace(LONG, bias_shape=(1, 1, 1, 1100), bias_dtype="float16"),
    ],
    ids=["plain", "split", "negative scale", "half", "bias", "bias, split"],
)
def test_a_sink_is_one_more_key_of_value_0(template, run_kernel, make_operands, problem):
    q, k, v = make_operands(problem)
    keep = some(problem)
    sink = SINK.to(getattr(torch, problem.sink_dtype))
    bias = None
    if problem.bias_shape is not None:
        bias = torch.from_numpy(np.random.default_rng(3).normal(0, 2, problem.bias_shape).astype("float32"))
        bias[..., 7] = torch.finfo(torch.float16).min
        bias = bias.to(getattr(torch, problem.bias_dtype))
    given = [x for x in (bias, sink) if x is not None]
    out, lse = (x.double().numpy() for x in run_kernel(template, problem, keep, [q, k, v, *given]))
    inputs = [x.double().numpy() for x in (q, k, v)]
    expected, expected_lse = attention_reference(
        problem, *inputs, keep, None if bias is None else bias.double().numpy(), sink.double().numpy()
    )
    np.testing.assert_allclose(out, expected, atol=2e-5 if problem.dtype == "float32" else 2e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=1e-6)
    assert not out[:, :, 1].any(), "a row that keeps nothing is 0"
    assert abs(out[:, 1]).max() < 1e-9 < abs(out[:, 2]).max(), "a large sink takes all, one of -inf nothing"


@pytest.mark.parametrize("problem", [PROBLEM, LONG], ids=["plain", "split"])
def test_extreme_sinks(template, run_kernel, make_operands, problem):
    """The largest and the lowest finite ones are safe; +inf and NaN make their head NaN and no other."""
    q, k, v = make_operands(problem)
    keep, largest = some(problem), torch.finfo(torch.float32).max
    out, lse = run_kernel(template, problem, keep, [q, k, v, torch.tensor([largest, -largest, torch.inf, torch.nan])])
    assert not out[:, 0].any() and (lse[:, 0] == largest).all()
    assert out[:, 2:].isnan().all() and lse[:, 2:].isnan().all()
    without = replace(problem, sink_dtype=None)
    plain_out, plain_lse = run_kernel(template, without, keep, [q, k, v])
    assert torch.equal(out[:, 1], plain_out[:, 1])
    kept = torch.from_numpy(keep.any(axis=1))
    torch.testing.assert_close(lse[:, 1, kept], plain_lse[:, 1, kept])
    assert (lse[:, 1, ~kept] == -largest).all()


def test_scores_far_from_the_sink(template, run_kernel, make_operands):
    """Scores near -400 beside a sink of -400, and scores that a sink of 0 outweighs altogether."""
    problem = replace(PROBLEM, sink_dtype="float32")
    q, k, v = make_operands(problem)
    q[..., 0], k[..., 0] = 45.0, -45.0
    keep, sink = some(problem), torch.tensor([-405.0, 0.0, -395.0, -1e4])
    out, lse = (x.double().numpy() for x in run_kernel(template, problem, keep, [q, k, v, sink]))
    inputs = [x.double().numpy() for x in (q, k, v)]
    expected, expected_lse = attention_reference(problem, *inputs, keep, sink=sink.double().numpy())
    np.testing.assert_allclose(out, expected, atol=5e-4)  # float32 resolves such scores to 3e-5
    np.testing.assert_allclose(lse, expected_lse, atol=5e-4)
    assert not out[:, 1].any() and abs(out[:, [0, 2, 3]]).max() > 0.1
