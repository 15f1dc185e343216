"""The CPU row-wise kernel where the row of the mask of each query is known only when it runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.tir_kernels.attention.cpu.test_kernels import MASKS, TOLERANCE, longformer, numpy_of, per_batch_and_head
from tir_kernels.attention.cpu import block_wise, row_wise
from tir_kernels.attention.problem import AttentionProblem, Layouts
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.select import choose
from tir_kernels.target import parse_target

LENGTH = 203


def problem_of(q_len, kv_len=LENGTH, head_dim=32, dtype="float32", heads=(4, 2), **kwargs):
    sizes = 2, *heads, q_len, kv_len, head_dim, head_dim
    return AttentionProblem(*sizes, dtype, head_dim**-0.5, has_positions=True, **kwargs)


def rows_of(keep, positions):
    return keep[..., np.asarray(positions), :]


@pytest.mark.parametrize("positions", [[0], [LENGTH - 1], [64, 65, 66], [7, 199, 8, 0, 202, 100, 101]], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_masks(run_kernel, make_operands, mask, positions):
    problem = problem_of(len(positions))
    keep = MASKS[mask](LENGTH, LENGTH)
    tensors = make_operands(problem)
    got = run_kernel(row_wise, problem, keep, [*tensors, torch.tensor(positions)]).numpy()
    expected = attention_reference(problem, *numpy_of(tensors), rows_of(keep, positions))
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("q_len, kv_len", [(1, 1), (1, 2), (2, 1100), (9, 64), (130, 130)])
def test_every_configuration(run_kernel, make_operands, q_len, kv_len):
    """Also more rows than a block has, and rows that are split."""
    problem = problem_of(q_len, kv_len, heads=(1, 1), gives_lse=True)
    positions = np.random.default_rng(0).permutation(kv_len)[:q_len]
    keep = longformer(kv_len, kv_len)
    tensors = make_operands(problem)
    expected = attention_reference(problem, *numpy_of(tensors), rows_of(keep, positions))
    configs = row_wise.configs(problem, None)
    assert any(config.splits > 1 for config in configs) == (kv_len == 1100)
    for config in configs:
        got = run_kernel(row_wise, problem, keep, [*tensors, torch.from_numpy(positions)], config=config)
        assert all(np.abs(x.numpy() - y).max() < TOLERANCE for x, y in zip(got, expected)), config.label


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_errs_at_most_twice_as_much_as_pytorch(run_kernel, make_operands, dtype):
    problem, positions = problem_of(3, dtype=dtype), [100, 101, 102]
    keep = rows_of(longformer(LENGTH, LENGTH), positions)
    q, k, v = make_operands(problem)
    expected = attention_reference(problem, *numpy_of([q, k, v]), keep)
    tensors = [q, k, v, torch.tensor(positions)]
    got = run_kernel(row_wise, problem, longformer(LENGTH, LENGTH), tensors).double().numpy()
    peer = F.scaled_dot_product_attention(q, k, v, torch.from_numpy(keep), enable_gqa=True).double().numpy()
    assert np.abs(got - expected).max() <= 2 * np.abs(peer - expected).max()


@pytest.mark.parametrize("kv_len", [LENGTH, 1100])
def test_bias_softcap_sink_and_layouts(run_kernel, make_operands, kv_len):
    """A bias has the rows of the call, not those of the mask."""
    layouts = Layouts("bshd", "bhsd", "bshd", "bshd")
    more = dict(bias_shape=(2, 1, 5, kv_len), softcap=3.0, sink_dtype="float32", layouts=layouts, gives_lse=True)
    problem, positions = problem_of(5, kv_len, **more), [3, 4, 5, 90, kv_len - 1]
    rng = np.random.default_rng(3)
    bias, sink = (torch.from_numpy(rng.normal(0, 2, n).astype(np.float32)) for n in (problem.bias_shape, (4,)))
    keep = per_batch_and_head(kv_len, kv_len)
    tensors = make_operands(problem)
    got = run_kernel(row_wise, problem, keep, [*tensors, bias, sink, torch.tensor(positions)])
    expected = attention_reference(problem, *numpy_of(tensors), rows_of(keep, positions), bias.numpy(), sink.numpy())
    assert all(np.abs(x.numpy() - y).max() < TOLERANCE for x, y in zip(got, expected))


@pytest.mark.parametrize("kv_len", [LENGTH, 1100])
@pytest.mark.parametrize("sink_dtype", [None, "float32"])
def test_positions_outside_of_the_mask(run_kernel, make_operands, kv_len, sink_dtype):
    """Negative ones count from the end; beyond both ends a row is NaN, also one that the mask would empty."""
    positions = [0, -1, -kv_len, -kv_len - 1, kv_len, kv_len - 1, 2**40, -(2**40)]
    is_outside = np.array([not -kv_len <= x < kv_len for x in positions])
    problem = problem_of(len(positions), kv_len, sink_dtype=sink_dtype, gives_lse=True)
    keep = longformer(kv_len, kv_len)
    keep[-1] = keep[0] = False
    tensors, sink = make_operands(problem), [torch.ones(4)] if sink_dtype else []
    inside = [0 if outside else x for x, outside in zip(positions, is_outside)]
    out, lse = run_kernel(row_wise, problem, keep, [*tensors, *sink, torch.tensor(positions)])
    assert out[:, :, is_outside].isnan().all() and lse[:, :, is_outside].isnan().all()
    expected = attention_reference(problem, *numpy_of(tensors), rows_of(keep, inside), sink=sink[0] if sink else None)
    for x, y in zip((out, lse), expected):
        x, y = x.numpy()[:, :, ~is_outside], y[:, :, ~is_outside]
        np.testing.assert_allclose(x, y, atol=TOLERANCE)


def test_what_the_mask_drops_is_not_read(run_kernel, make_operands):
    """Blocks that the row does not list, and masked keys within a block."""
    problem = problem_of(1)
    keep = np.tril(np.ones((LENGTH, LENGTH), bool)) & ~np.tril(np.ones((LENGTH, LENGTH), bool), -20)
    tensors = make_operands(problem)
    expected = run_kernel(row_wise, problem, keep, [*tensors, torch.tensor([150])])
    for x in tensors[1:]:
        x[:, :, ~keep[150]] = float("nan")
    assert torch.equal(run_kernel(row_wise, problem, keep, [*tensors, torch.tensor([150])]), expected)


def test_only_the_row_wise_kernel_takes_them():
    target = parse_target("llvm")
    problem = problem_of(64)
    assert "rows of the mask follow one another" in block_wise.unsupported(problem, target)
    choice = choose(problem, None, target)
    assert choice.template is row_wise and (choice.mask.q_len, choice.mask.kv_len) == (LENGTH, LENGTH)
    assert choice.predicted_us < choose(replace(problem, q_len=128), None, target).predicted_us
