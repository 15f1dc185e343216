"""The tensor expressions of masked attention against its definition in NumPy."""

from dataclasses import replace

import numpy as np
import pytest
import tvm

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.target import parse_target
from tir_kernels.tuning.workload import attention_workload

PROBLEM = AttentionProblem(1, 4, 2, 5, 7, 8, 6, "float32", 0.3)


def run(problem, inputs):
    target = parse_target("llvm")
    with target:
        function = tvm.compile(attention_workload(problem, "digest"), target=target)["main"]
    outputs = [np.full(problem.shape("out"), np.nan, "float32")]
    if problem.gives_lse:
        outputs.append(np.full(problem.lse_shape, np.nan, "float32"))
    outputs = [tvm.runtime.tensor(x) for x in outputs]
    function(*(tvm.runtime.tensor(x) for x in inputs), *outputs)
    return [x.numpy() for x in outputs]


def random(problem, *shapes):
    generator = np.random.default_rng(1)
    shapes = [*(problem.shape(name) for name in "qkv"), *shapes]
    return [generator.standard_normal(shape).astype("float32") for shape in shapes]


def random_mask(problem):
    """About half of the elements; the second row keeps nothing."""
    shape = problem.batch, problem.q_heads, problem.q_len, problem.kv_len
    mask = np.random.default_rng(2).random(shape) < 0.5
    mask[:, :, 1] = False
    return mask


@pytest.mark.parametrize(
    "problem",
    [
        PROBLEM,
        replace(PROBLEM, bias_shape=(1, 4, 1, 7)),
        replace(PROBLEM, bias_shape=(1, 4, 1, 7), softcap=0.5),
        replace(PROBLEM, layouts=Layouts("bshd", View(200, 4, 0, 8, 16), "hbsd", "shbd"), gives_lse=True),
    ],
    ids=["plain", "bias", "softcap", "layouts"],
)
def test_one_part(problem):
    inputs = random(problem, *([problem.bias_shape] if problem.bias_shape else []))
    mask = random_mask(problem)
    expected = attention_reference(problem, *inputs[:3], mask, *inputs[3:])
    expected = expected if problem.gives_lse else [expected]
    for x, y in zip(run(problem, [*inputs, mask]), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_a_sink_counts_once_in_parts_too():
    whole = replace(PROBLEM, gives_lse=True, sink_dtype="float32")
    inputs, mask = random(whole), random_mask(whole)
    sink = np.array([0.5, -np.inf, 200.0, 3e38], "float32")
    expected = attention_reference(whole, *inputs, mask, sink=sink)
    for x, y in zip(run(whole, [*inputs, sink, mask]), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-5)
    first = np.arange(PROBLEM.kv_len) < 3
    prior = run(replace(PROBLEM, gives_lse=True), [*inputs, mask & first])
    both = run(replace(whole, continues=True), [*inputs, sink, *prior, mask & ~first])
    for x, y in zip(both, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-5)


def test_parts_add_up_to_the_whole():
    near, far = replace(PROBLEM, gives_lse=True), replace(PROBLEM, continues=True)
    inputs, mask = random(PROBLEM), random_mask(PROBLEM)
    first = np.arange(PROBLEM.kv_len) < 3
    prior = run(near, [*inputs, mask & first])
    (out,) = run(far, [*inputs, *prior, mask & ~first])
    np.testing.assert_allclose(out, attention_reference(PROBLEM, *inputs, mask), atol=1e-5)
