"""Rules against their definitions in NumPy, on random and structured queries and keys."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from stof_tvm.masks.runtime.selection import block_means, most_mass
from tests.stof_tvm.masks.runtime import references
from tir_kernels.errors import MaskError

runtime = masks.runtime


def random(q_len, kv_len=None, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    shapes = (2, 4, q_len, 16), (2, 2, kv_len or q_len, 16)
    return tuple((torch.randn(shape) * 2).to(dtype) for shape in shapes)


def structured(length):
    """A few keys that all queries like, and a distance at which they like the key."""
    q, k = random(length, seed=7)
    k[:, :, 70:72] += 3 * q.mean((1, 2))[:, None, None] + 2
    k[:, :, : length - 90] += 2 * q[:, ::2, 90:]
    return q, k


CASES = {"random": random(200), "structured": structured(230), "whole blocks": random(128), "short": random(21)}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_top_blocks(case, causal):
    q, k = CASES[case]
    for n in (1, 3, 100):
        got = runtime.top_blocks(n, block=32, causal=causal).block_map(q, k)
        np.testing.assert_array_equal(got, references.top_blocks(q, k, n, 32, causal))


def test_top_blocks_of_other_lengths():
    q, k = random(70, 300)
    got = runtime.top_blocks(2, block=64).block_map(q, k)
    np.testing.assert_array_equal(got, references.top_blocks(q, k, 2, 64, False))
    assert got.shape == (2, 4, 2, 5) and (got.sum(-1) == 2).all()


@pytest.mark.parametrize("counts", [(0, 0, 0, 0), (5, 9, 2, 4), (1, 3, 4, 6), (400, 2, 0, 1)])
@pytest.mark.parametrize("case", CASES)
def test_vertical_slash(case, counts):
    q, k = CASES[case]
    vertical, slash, sinks, window = counts
    rule = runtime.vertical_slash(vertical, slash, last=16, sinks=sinks, window=window, block=32)
    expected = references.vertical_slash(q, k, vertical, slash, 16, sinks, window, 32)
    np.testing.assert_array_equal(rule.block_map(q, k), expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_xattention(case, causal):
    q, k = CASES[case]
    for stride, mass in ((8, 0.5), (16, 0.9), (4, 0.99)):
        got = runtime.xattention(stride, mass, block=32, causal=causal).block_map(q, k)
        np.testing.assert_array_equal(got, references.xattention(q, k, stride, mass, 32, causal))


def test_xattention_finds_what_is_planted():
    """One block of keys that is like the queries is found, and little else."""
    torch.manual_seed(3)
    q, k = torch.randn(1, 1, 256, 32) * 0.1 + 1, torch.randn(1, 1, 256, 32) * 0.1
    k[:, :, 128:160] += 4
    got = runtime.xattention(8, 0.8, block=32, causal=False).block_map(q, k)
    assert got[..., 4].all() and got.sum() == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rule", [runtime.top_blocks(2, 32), runtime.vertical_slash(9, 9, block=32), runtime.xattention(block=32)], ids=repr
)
def test_half_precision_is_computed_in_float32(rule, dtype):
    q, k = random(150, dtype=dtype)
    assert torch.equal(rule.block_map(q, k), rule.block_map(q.float(), k.float()))


def test_means_of_short_blocks():
    x = torch.arange(10.0).reshape(1, 1, 10, 1)
    assert block_means(x, 4).flatten().tolist() == [1.5, 5.5, 8.5]


def test_mass():
    weights, none = torch.tensor([[0.1, 0.5, 0.4, 0.0]]), torch.zeros(4, dtype=torch.bool)
    assert most_mass(weights, 0.45, none).tolist() == [[False, True, False, False]]
    assert most_mass(weights, 0.8, none).tolist() == [[False, True, True, False]]
    assert most_mass(weights, 0.2, torch.tensor([True, False, False, True])).tolist() == [[True, True, False, True]]
    assert not most_mass(torch.zeros(1, 4), 0.9, none).any()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: runtime.top_blocks(0), "k=0 must be an integer of at least 1"),
        (lambda: runtime.top_blocks(1, block=40), "block=40: its height, 40, must be a multiple of 16"),
        (lambda: runtime.top_blocks(1, block=(16, 16)), "its width, 16, must be a multiple of 32"),
        (lambda: runtime.xattention(stride=24), "stride=24 must divide"),
        (lambda: runtime.xattention(mass=0), "mass=0 must be a number above 0"),
        (lambda: runtime.xattention(mass=float("nan")), "mass=nan"),
        (lambda: runtime.vertical_slash(-1, 3), "vertical=-1"),
        (lambda: runtime.vertical_slash(3, 3).block_map(*random(64, 96)), "q has 64 tokens, k 96"),
    ],
)
def test_refused(make, words):
    with pytest.raises(MaskError, match=words):
        make()
