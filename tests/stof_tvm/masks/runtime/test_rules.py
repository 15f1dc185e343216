"""Rules against their definitions in NumPy, on random and structured queries and keys."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from stof_tvm.masks.runtime import pooled
from stof_tvm.masks.runtime.low_rank import projection
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_top_blocks_by_bounds(case, causal):
    q, k = CASES[case]
    for n in (1, 3, 100):
        got = runtime.top_blocks(n, block=32, causal=causal, pool="bounds").block_map(q, k)
        np.testing.assert_array_equal(got, references.top_bounds(q, k, n, 32, causal))


def test_bounds_of_many_rows_are_those_of_few(monkeypatch):
    q, k = random(230)
    rule = runtime.top_blocks(2, block=32, pool="bounds")
    expected = rule.block_map(q, k)
    monkeypatch.setattr(pooled, "HELD", 1)  # a block of rows at a time
    assert torch.equal(rule.block_map(q, k), expected)


def test_bounds_see_a_key_that_the_mean_hides():
    q, k = torch.ones(1, 1, 128, 8), torch.zeros(1, 1, 128, 8)
    k[:, :, :64] = 0.1
    k[:, :, 100] = 5
    k[:, :, 64:100] = -0.2
    means, bounds = (runtime.top_blocks(1, pool=pool).block_map(q, k)[0, 0, 0].tolist() for pool in ("mean", "bounds"))
    assert means == [True, False] and bounds == [False, True]


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


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tau, least", [(0, 0), (0.2, 32), (1, 0), (0.1, 90), (0, 1024)])
def test_flex_prefill(case, tau, least):
    q, k = CASES[case]
    for gamma in (0.3, 0.9, 1):
        got = runtime.flex_prefill(gamma, tau, least, block=32).block_map(q, k)
        np.testing.assert_array_equal(got, references.flex_prefill(q, k, gamma, tau, least, 32))


def test_flex_prefill_has_patterns_of_heads():
    """Means predict the weights of the first head, where a block's keys are alike, and miss the second one's keys."""
    torch.manual_seed(5)
    q, k = torch.randn(1, 2, 512, 16) * 0.1, torch.randn(1, 2, 512, 16) * 0.1
    q += 1
    k[:, 0] += torch.randn(16, 16).repeat_interleave(32, 0) * 2
    k[:, 1, [3, 100]] += 4
    by_tau = [runtime.flex_prefill(0.8, tau, 0, 32).block_map(q, k)[0] for tau in (0, 0.15, 1)]
    assert torch.equal(by_tau[1][0], by_tau[2][0]) and not torch.equal(by_tau[1][0], by_tau[0][0])
    assert torch.equal(by_tau[1][1], by_tau[0][1]) and not torch.equal(by_tau[1][1], by_tau[2][1])
    assert by_tau[1][1, 4:, [0, 3]].all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_sparge(case, causal):
    q, k = CASES[case]
    for mass, similarity in ((0.6, -1), (0.9, 0.035), (0.5, 0.04), (0.98, 1)):
        got = runtime.sparge(mass, similarity, 32, causal).block_map(q, k)
        np.testing.assert_array_equal(got, references.sparge(q, k, mass, similarity, 32, causal))


def test_sparge_keeps_what_is_not_like_its_mean():
    torch.manual_seed(1)
    q, k = torch.ones(1, 1, 256, 16), torch.ones(1, 1, 256, 16) * 0.1
    k[:, :, 64:96] = torch.randn(32, 16)
    k[:, :, 200:224] = 3
    q[:, :, 32:64] = torch.randn(32, 16)
    kept = runtime.sparge(0.7, 0.6, block=32).block_map(q, k)[0, 0]
    assert kept[1].all() and kept[:, 2].all()
    others = [r for r in range(8) if r != 1]
    assert (kept[others].sum(-1) == 2).all() and kept[others][:, 6].all()
    alone = runtime.sparge(0.7, 0.6, block=32).block_map(q, torch.randn(1, 1, 256, 16))
    assert alone.all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("forced", [(0, 0, 0), (1, 2, 1), (2, 1, 0), (99, 0, 0)])
def test_flash_prefill(case, forced):
    q, k = CASES[case]
    for threshold in (0, 0.1, 0.7, 1):
        got = runtime.flash_prefill(threshold, *forced, block=32).block_map(q, k)
        np.testing.assert_array_equal(got, references.flash_prefill(q, k, threshold, *forced, 32))


def test_flash_prefill_of_other_lengths():
    for lengths in ((70, 300), (300, 70)):
        q, k = random(*lengths)
        got = runtime.flash_prefill(0.6, 1, 1, 1, block=32).block_map(q, k)
        np.testing.assert_array_equal(got, references.flash_prefill(q, k, 0.6, 1, 1, 1, 32))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mass, k", [(0.6, None), (0.95, None), (1, None), (0.9, 2)])
def test_low_rank(case, causal, mass, k):
    q, keys = CASES[case]
    for rank, bits, stride in ((8, 4, 8), (24, 8, 1), (12, 5, 32)):
        got = runtime.low_rank(mass, k, rank, bits, stride, 7, 32, causal).block_map(q, keys)
        expected = references.low_rank(q, keys, mass, k, rank, bits, stride, 7, 32, causal)
        np.testing.assert_array_equal(got, expected)


def test_projections_keep_products_on_average():
    of = [projection(64, 48, seed, torch.device("cpu")) for seed in range(40)]
    products = torch.stack([x @ x.T for x in of]).mean(0)
    assert (products - torch.eye(64)).abs().max() < 0.15
    assert (torch.stack(of) == 0).float().mean() == pytest.approx(2 / 3, abs=0.01)
    assert not torch.equal(of[0], of[1])


def test_low_rank_finds_what_every_pair_says():
    """More dimensions and bits find more of what exact scores weigh."""
    torch.manual_seed(2)
    q, k = torch.randn(1, 2, 256, 32) * 2, torch.randn(1, 2, 256, 32)
    found = [
        masks.recall(runtime.low_rank(k=2, rank=r, bits=b, stride=1, causal=False, block=32), q, k).mean
        for r, b in ((1, 2), (32, 4), (512, 8))
    ]
    weights = (q @ k.mT / 32**0.5).softmax(-1).unflatten(3, (8, 32)).unflatten(2, (8, 32)).sum((3, 5))
    best = weights.topk(2).values.sum(-1).mean().item() / 32
    assert found[0] < found[1] < found[2] and best - 0.02 < found[2] <= best + 1e-6


def test_xattention_finds_what_is_planted():
    """One block of keys that is like the queries is found, and little else."""
    torch.manual_seed(3)
    q, k = torch.randn(1, 1, 256, 32) * 0.1 + 1, torch.randn(1, 1, 256, 32) * 0.1
    k[:, :, 128:160] += 4
    got = runtime.xattention(8, 0.8, block=32, causal=False).block_map(q, k)
    assert got[..., 4].all() and got.sum() == 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rule",
    [
        runtime.top_blocks(2, 32),
        runtime.top_blocks(2, 32, pool="bounds"),
        runtime.vertical_slash(9, 9, block=32),
        runtime.xattention(block=32),
        runtime.flex_prefill(least=0, block=32),
        runtime.sparge(0.5, 0.01, 32),
        runtime.flash_prefill(0.7, 1, 1, 1, 32),
        runtime.low_rank(block=32),
    ],
    ids=repr,
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
        (lambda: runtime.top_blocks(1, pool="max"), "pool='max' must be 'mean' or 'bounds'"),
        (lambda: runtime.top_blocks(1, causal=2), "causal=2 must be True or False"),
        (lambda: runtime.top_blocks(1, causal=None), "causal=None must be True or False"),
        (lambda: runtime.xattention(causal="no"), "causal='no' must be True or False"),
        (lambda: runtime.sparge(causal=1), "causal=1 must be True or False"),
        (lambda: runtime.low_rank(causal=None), "causal=None must be True or False"),
        (lambda: runtime.top_blocks(0), "k=0 must be an integer of at least 1"),
        (lambda: runtime.top_blocks(1, block=40), "block=40: its height, 40, must be a multiple of 16"),
        (lambda: runtime.top_blocks(1, block=(16, 16)), "its width, 16, must be a multiple of 32"),
        (lambda: runtime.xattention(stride=24), "stride=24 must divide"),
        (lambda: runtime.xattention(mass=0), "mass=0 must be a number above 0"),
        (lambda: runtime.xattention(mass=float("nan")), "mass=nan"),
        (lambda: runtime.vertical_slash(-1, 3), "vertical=-1"),
        (lambda: runtime.flex_prefill(gamma=0), "gamma=0 must be a number above 0, at most 1"),
        (lambda: runtime.flex_prefill(tau=1.5), "tau=1.5 must be a number from 0 to 1"),
        (lambda: runtime.flex_prefill(least=-1), "least=-1 must be an integer of at least 0"),
        (lambda: runtime.flex_prefill(block=(64, 32)), r"flex_prefill takes square blocks, got block=\(64, 32\)"),
        (lambda: runtime.flex_prefill().block_map(*random(64, 96)), "flex_prefill is for prompts: q has 64"),
        (lambda: runtime.sparge(mass="1"), "mass='1' must be a number above 0"),
        (lambda: runtime.sparge(similarity=float("nan")), "similarity=nan must be a number from -1 to 1"),
        (lambda: runtime.flash_prefill(True), "threshold=True must be a number from 0 to 1"),
        (lambda: runtime.flash_prefill(sinks=0.5), "sinks=0.5 must be an integer"),
        (lambda: runtime.flash_prefill(block=(32, 64)), "flash_prefill takes square blocks"),
        (lambda: runtime.low_rank(k=0), "k=0 must be an integer of at least 1"),
        (lambda: runtime.low_rank(bits=1), "bits=1 must be an integer of at least 2"),
        (lambda: runtime.low_rank(bits=9), "bits=9 must be at most 8"),
        (lambda: runtime.low_rank(rank=0), "rank=0"),
        (lambda: runtime.low_rank(stride=24), "stride=24 must divide the height and width of block=64"),
        (lambda: runtime.vertical_slash(3, 3).block_map(*random(64, 96)), "q has 64 tokens, k 96"),
    ],
)
def test_refused(make, words):
    with pytest.raises(MaskError, match=words):
        make()


@pytest.mark.parametrize("make", [lambda x: runtime.top_blocks(1, causal=x), lambda x: runtime.xattention(causal=x)])
def test_flags_of_numpy(make):
    for flag in (True, False):
        assert repr(make(np.bool_(flag))) == repr(make(flag)) and make(np.bool_(flag)).within == make(flag).within
