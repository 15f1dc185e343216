"""The CPU block-wise kernel with a block map that is known only when it runs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tir_kernels.attention.cpu.test_kernels import MASKS, TOLERANCE, numpy_of, per_batch_and_head
from tir_kernels.attention.cpu import block_wise, row_wise
from tir_kernels.attention.problem import AttentionProblem, BlockMap, Layouts
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise import kernel as cuda_row_wise
from tir_kernels.attention.select import choose
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.problems import attention
from tir_kernels.target import parse_target

LENGTH = 203


def problem_of(block_map, q_len=LENGTH, kv_len=LENGTH, dtype="float32", **rest):
    return AttentionProblem(2, 4, 2, q_len, kv_len, 32, 24, dtype, 32**-0.5, block_map=block_map, **rest)


def map_of(problem, share=0.4, seed=5):
    shape = problem.block_map.shape(problem.q_len, problem.kv_len)
    return np.random.default_rng(seed).random(shape) < share


def spread(problem, block_map):
    """The pairs that a block map keeps."""
    rows = np.arange(problem.q_len) // problem.block_map.block_m
    return block_map[:, :, rows][..., np.arange(problem.kv_len) // problem.block_map.block_n]


def compared(run_kernel, problem, keep, block_map, tensors, *more, config=None, tolerance=TOLERANCE):
    got = run_kernel(block_wise, problem, keep, [*tensors, *more, torch.from_numpy(block_map)], config=config)
    both = np.asarray(keep) & spread(problem, block_map)
    expected = attention_reference(problem, *numpy_of(tensors), both, *(x.numpy() for x in more))
    pairs = zip(got, expected) if problem.gives_lse else [(got, expected)]
    for x, y in pairs:
        x = x.float().numpy()
        np.testing.assert_array_equal(np.isneginf(x), np.isneginf(y))
        assert np.abs(np.where(np.isneginf(x), 0, x) - np.where(np.isneginf(y), 0, y)).max() < tolerance
    return got


@pytest.mark.parametrize("mask", MASKS)
def test_a_map_within_a_mask(run_kernel, make_operands, mask):
    problem = problem_of(BlockMap(2, 4, 64, 64))
    compared(run_kernel, problem, MASKS[mask](LENGTH, LENGTH), map_of(problem), make_operands(problem))


@pytest.mark.parametrize("batch, heads, m, n", [(1, 1, 64, 64), (1, 4, 128, 32), (2, 1, 16, 96), (2, 4, 48, 64)])
def test_every_configuration_that_divides_the_map(run_kernel, make_operands, batch, heads, m, n):
    problem = problem_of(BlockMap(batch, heads, m, n), 130, gives_lse=True)
    configs = block_wise.configs(problem, None)
    assert configs and all(m % c.block_m == 0 and n % c.block_n == 0 for c in configs)
    keep = per_batch_and_head(130, LENGTH)
    for config in configs:
        compared(run_kernel, problem, keep, map_of(problem), make_operands(problem), config=config)


def test_the_same_code_reads_another_map_and_an_empty_one_gives_zero(run_kernel, make_operands):
    problem = problem_of(BlockMap(1, 4, 64, 64), gives_lse=True)
    tensors, keep = make_operands(problem), np.ones((LENGTH, LENGTH), bool)
    outs = [compared(run_kernel, problem, keep, map_of(problem, 0.4, seed), tensors)[0] for seed in (1, 2)]
    assert not torch.equal(*outs)
    out, lse = compared(run_kernel, problem, keep, map_of(problem, 0.0), tensors)
    assert (out == 0).all() and torch.isneginf(lse).all()
    whole = compared(run_kernel, problem, keep, map_of(problem, 1.1), tensors)[0]
    without = run_kernel(block_wise, replace(problem, block_map=None), keep, tensors)[0]
    assert torch.equal(whole, without)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(run_kernel, make_operands, dtype):
    problem = problem_of(BlockMap(1, 1, 64, 64), dtype=dtype)
    tolerance = 4 * torch.finfo(getattr(torch, dtype)).eps
    compared(
        run_kernel,
        problem,
        MASKS["causal"](LENGTH, LENGTH),
        map_of(problem),
        make_operands(problem),
        tolerance=tolerance,
    )


def test_bias_sink_and_layouts(run_kernel, make_operands):
    more = dict(bias_shape=(2, 1, 70, LENGTH), sink_dtype="float32", softcap=3.0, gives_lse=True)
    problem = problem_of(BlockMap(2, 4, 64, 64), 70, layouts=Layouts("bshd", "bhsd", "bshd", "bshd"), **more)
    rng = np.random.default_rng(3)
    bias, sink = (torch.from_numpy(rng.normal(0, 2, n).astype(np.float32)) for n in (problem.bias_shape, (4,)))
    keep = np.ones((70, LENGTH), bool)
    compared(run_kernel, problem, keep, map_of(problem), make_operands(problem), bias, sink)


def test_what_reads_no_map_says_so():
    problem = problem_of(BlockMap(1, 1, 64, 64), dtype="float16")
    assert "reads no block map" in row_wise.unsupported(problem, parse_target("llvm"))
    assert choose(problem, None, parse_target("llvm")).template is block_wise
    for arch in ("sm_80", "sm_90a"):
        target = parse_target(f"cuda -arch={arch}")
        assert "reads no block map" in cuda_row_wise.unsupported(problem, target)
        assert choose(problem, None, target).template.NAME in ("block-wise", "warp-specialized")
    with pytest.raises(UnsupportedError, match="with a block map that is known at run time are not tuned"):
        attention.tensors(problem)


@pytest.mark.parametrize(
    "given, words",
    [
        (BlockMap(3, 1, 64, 64), "batch=3 does not broadcast to 2"),
        (BlockMap(1, 2, 64, 64), "heads=2 does not broadcast to 4"),
        (BlockMap(1, 1, 24, 64), "block_m=24 of a block map must be a positive multiple of 16"),
        (BlockMap(1, 1, 64, 16), "block_n=16 of a block map must be a positive multiple of 32"),
        (BlockMap(1, 1, 0, 64), "block_m=0"),
    ],
)
def test_refused(given, words):
    with pytest.raises(InputError, match=words):
        problem_of(given)


def test_a_configuration_must_divide_the_map():
    with pytest.raises(InputError, match="blocks of 64x32 do not divide those of"):
        block_wise.instantiate(problem_of(BlockMap(1, 1, 32, 32)), block_wise.Config(64, 32), parse_target("llvm"))


def test_not_with_positions():
    with pytest.raises(UnsupportedError, match="a block map beside positions"):
        problem_of(BlockMap(1, 1, 64, 64), has_positions=True)
