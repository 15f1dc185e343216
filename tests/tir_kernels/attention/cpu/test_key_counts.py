"""A number of keys that is known at run time: CPU attention kernels against the float64 reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.reference import attention_reference
from tir_kernels.errors import InputError

PROBLEM = AttentionProblem(3, 4, 2, 37, 203, 24, 20, "float32", 0.2, gives_lse=True, key_counts=3)
LONG = replace(PROBLEM, batch=1, q_len=3, kv_len=1100, key_counts=1)  # the row-wise kernel splits its rows
COUNTS = {1: [100], 3: [203, 1, 70]}


def some(problem) -> np.ndarray:
    keep = np.random.default_rng(1).random((problem.q_len, problem.kv_len)) < 0.3
    keep[1] = False
    keep[2:, :64] = True  # a full block
    return keep


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        LONG,
        replace(PROBLEM, key_counts=1, dtype="float16", scale=-0.2),
        replace(PROBLEM, bias_shape=(3, 1, 1, 203), sink_dtype="float32", softcap=3.0),
        replace(LONG, bias_shape=(1, 4, 3, 1100)),
    ],
    ids=["each entry", "split", "one for all, half", "bias, sink, softcap", "bias, split"],
)
def test_keys_from_the_count_on_take_no_part(template, run_kernel, make_operands, problem):
    q, k, v = make_operands(problem)
    counts = torch.tensor(COUNTS[problem.key_counts], dtype=torch.int32)
    for b in range(problem.batch):  # what lies there is no number
        n = int(counts[problem.key_count_index(b)])
        k[b, :, n::2], k[b, :, n + 1 :: 2] = torch.nan, torch.inf
    keep, rest = some(problem), []
    rng = np.random.default_rng(3)
    bias = rng.normal(0, 2, problem.bias_shape).astype("float32") if problem.bias_shape else None
    sink = rng.normal(0, 2, problem.q_heads).astype("float32") if problem.sink_dtype else None
    rest = [torch.from_numpy(x) for x in (bias,) if x is not None] + [counts]
    rest += [torch.from_numpy(x) for x in (sink,) if x is not None]
    out, lse = (x.double().numpy() for x in run_kernel(template, problem, keep, [q, k, v, *rest]))
    inputs = [x.nan_to_num(0, 0).double().numpy() for x in (q, k, v)]
    expected, expected_lse = attention_reference(problem, *inputs, keep, bias, sink, counts.numpy())
    np.testing.assert_allclose(out, expected, atol=2e-5 if problem.dtype == "float32" else 2e-3)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-5, rtol=1e-6)


def test_no_key_and_all_keys(template, run_kernel, make_operands):
    """A count of 0 or less leaves nothing, one of kv_len or more what there is without a count."""
    q, k, v = make_operands(PROBLEM)
    keep = some(PROBLEM)
    out, lse = run_kernel(template, PROBLEM, keep, [q, k, v, torch.tensor([0, 1 << 30, -5], dtype=torch.int32)])
    plain, plain_lse = run_kernel(template, replace(PROBLEM, key_counts=0), keep, [q, k, v])
    assert not out[[0, 2]].any() and (lse[[0, 2]] == -torch.inf).all()
    assert torch.equal(out[1], plain[1]) and torch.equal(lse[1], plain_lse[1])


def test_counts_for_some_batch_entries_are_refused():
    with pytest.raises(InputError, match="key_counts=2 must be 0, 1 or the batch size, 3"):
        replace(PROBLEM, key_counts=2)
