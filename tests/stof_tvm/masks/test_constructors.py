"""Each constructor against a formula written here by index arithmetic, at odd lengths and several block sizes."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from tir_kernels.errors import MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask

LENGTHS = [(97, 97), (113, 203), (203, 113), (257, 257), (1023, 1023), (1, 97)]
BLOCKS = [(8, 8), (16, 32), (64, 64), (128, 64), (96, 192)]


def splitmix(x):
    """SplitMix64 in Python integers; its first output from state 0 is the published test vector."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def random_squares(q_len, kv_len, size, fill, seed):
    keep = np.zeros((q_len, kv_len), bool)
    for r in range(0, q_len, size):
        for c in range(0, kv_len, size):
            bits = splitmix((splitmix((splitmix(seed) + r // size) % 2**64) + c // size) % 2**64)
            keep[r : r + size, c : c + size] = (bits >> 11) / 2**53 < fill
    return keep


def sparse_transformer_fixed(i, j, stride, summary):
    return (j <= i) & ((i // stride == j // stride) | (stride - j % stride <= summary))


def around_and_global(i, j, window, tokens):
    return (np.abs(i - j) <= window) | (i < tokens) | (j < tokens)


# name: (mask, formula of (i, j, q_len, kv_len) with i a column and j a row of indices)
CASES = {
    "causal": (masks.causal(), lambda i, j, q, k: j <= i),
    "causal bottom-right": (masks.causal(align="bottom-right"), lambda i, j, q, k: j - k <= i - q),
    "window": (masks.sliding_window(17), lambda i, j, q, k: np.abs(i - j) <= 17),
    "window 0": (masks.sliding_window(0), lambda i, j, q, k: i == j),
    "window wide": (masks.sliding_window(5000), lambda i, j, q, k: (i == i) & (j == j)),
    "window causal": (masks.sliding_window(40, causal=True), lambda i, j, q, k: (j <= i) & (i <= j + 40)),
    "everything": (masks.everything(), lambda i, j, q, k: i * j >= 0),
    "dilated": (masks.dilated_window(5, 3), lambda i, j, q, k: np.isin(i - j, [3 * n for n in range(-5, 6)])),
    "dilated 1": (masks.dilated_window(9, 1), lambda i, j, q, k: np.abs(i - j) <= 9),
    "global count": (masks.global_tokens(20), lambda i, j, q, k: (i < 20) | (j < 20)),
    "global indices": (
        masks.global_tokens([0, 31, 96]),
        lambda i, j, q, k: np.isin(i, [0, 31, 96]) | np.isin(j, [0, 31, 96]),
    ),
    "longformer": (masks.longformer(12, 7), lambda i, j, q, k: around_and_global(i, j, 12, 7)),
    "longformer default": (
        masks.longformer(),
        lambda i, j, q, k: around_and_global(i, j, int(k**0.5), int(k**0.5)),
    ),
    "longformer indices": (
        masks.longformer(window=4, global_tokens=[50]),
        lambda i, j, q, k: (np.abs(i - j) <= 4) | (i == 50) | (j == 50),
    ),
    "bigbird": (
        masks.bigbird(10, 6, random_fill=0.3, block=32, seed=7),
        lambda i, j, q, k: around_and_global(i, j, 10, 6) | random_squares(q, k, 32, 0.3, 7),
    ),
    "bigbird default": (
        masks.bigbird(),
        lambda i, j, q, k: around_and_global(i, j, int(k**0.5), int(k**0.5)) | random_squares(q, k, 64, 0.1, 0),
    ),
    "bigbird odd block": (
        masks.bigbird(0, 0, random_fill=0.5, block=13, seed=2**64 - 1),
        lambda i, j, q, k: (i == j) | random_squares(q, k, 13, 0.5, 2**64 - 1),
    ),
    "bigbird everything": (masks.bigbird(0, 0, random_fill=1), lambda i, j, q, k: (i >= 0) & (j >= 0)),
    "strided": (
        masks.strided(24),
        lambda i, j, q, k: (j <= i) & ((i - j <= 24) | ((i - j) % 24 == 0)),
    ),
    "strided 1": (masks.strided(1), lambda i, j, q, k: j <= i),
    "fixed": (masks.fixed(20, 3), lambda i, j, q, k: sparse_transformer_fixed(i, j, 20, 3)),
    "prefix": (masks.prefix_lm(45), lambda i, j, q, k: (j <= i) | (j < 45)),
    "a-shape": (masks.a_shape(4, 30), lambda i, j, q, k: (j <= i) & ((j < 4) | (i - j <= 30))),
    "vertical slash": (
        masks.vertical_slash([3, 64, 65], [0]),
        lambda i, j, q, k: (j <= i) & ((j == 3) | (j == 64) | (j == 65) | (i == j)),
    ),
    "padding": (masks.padding([70]), lambda i, j, q, k: (i >= 0) & (j < 70)),
}


@pytest.mark.parametrize("name", CASES)
def test_constructor(name):
    mask, formula = CASES[name]
    for q_len, kv_len in LENGTHS:
        i, j = np.arange(q_len)[:, None], np.arange(kv_len)[None, :]
        expected = np.broadcast_to(formula(i, j, q_len, kv_len), (q_len, kv_len))
        np.testing.assert_array_equal(mask.dense(q_len, kv_len).numpy(), expected)
        for block in BLOCKS:
            compiled = mask.compile(q_len, kv_len, block)
            assert compiled == BlockSparseMask.from_dense(expected, block), (q_len, kv_len, block)
        compiled.validate()
        assert mask.density(q_len, kv_len) == pytest.approx(expected.mean())


@pytest.mark.parametrize("lengths", [(97,), (1, 40, 0, 56), (8, 8, 81), [1] * 97])
def test_document(lengths):
    owner = [n for n, length in enumerate(lengths) for _ in range(length)]
    expected = np.array([[a == b for b in owner] for a in owner])
    np.testing.assert_array_equal(masks.document(lengths).dense(97).numpy(), expected)
    for block in BLOCKS:
        assert masks.document(lengths).compile(97, block=block) == BlockSparseMask.from_dense(expected, block)


INSIDE = [
    masks.causal(),
    masks.sliding_window(3) & ~masks.causal(),
    masks.global_tokens([0]) | masks.dilated_window(2, 3),
    masks.bigbird(block=8),  # of each document's own length
    masks.per_head([masks.causal(), masks.longformer(), masks.prefix_lm(2)]),
]


@pytest.mark.parametrize("rest", [0, 19])
@pytest.mark.parametrize("inside", INSIDE, ids=repr)
def test_inside_documents(inside, rest):
    lengths = [30, 1, 41, 0, 25]
    mask = masks.document(lengths[:4] + [25 - rest], inside, rest)
    expected, first = np.zeros(((1, 3) if inside.heads else ()) + (97, 97), bool), 0
    for length in [*lengths[:4], 25 - rest]:
        if length:
            expected[..., first : first + length, first : first + length] = inside.dense(length)
        first += length
    expected[..., first:, first:] = True
    np.testing.assert_array_equal(mask.dense(97).numpy(), expected)
    for block in ((16, 16), (32, 64)):
        assert mask.compile(97, block=block).density == pytest.approx(expected.mean())
    assert mask == masks.document(mask.lengths, inside, rest) != masks.document(mask.lengths, inside, rest + 1)


def test_vertical_slash_far_diagonals():
    expected = np.array([[j <= i and (j == 150 or i - j in (1, 90, 112)) for j in range(203)] for i in range(113)])
    mask = masks.vertical_slash([150], [90, 1, 112, 1])
    np.testing.assert_array_equal(mask.dense(113, 203).numpy(), expected)
    assert mask.compile(113, 203, (16, 16)) == BlockSparseMask.from_dense(expected, (16, 16))


def test_padding_tells_batch_entries_apart():
    mask = masks.padding([30, 97, 0, 30])
    assert (mask.batch, mask.heads) == (4, None)
    dense = mask.dense(11, 97)
    assert dense.shape == (4, 1, 11, 97)
    for b, length in enumerate([30, 97, 0, 30]):
        for j in range(97):
            assert dense[b, 0, :, j].all() == dense[b, 0, :, j].any() == (j < length)
    compiled = mask.compile(11, 97, (8, 16))
    assert compiled == BlockSparseMask.from_dense(dense.numpy(), (8, 16))
    assert compiled.head_to_mask.tolist() == [[0], [1], [2], [0]]


def test_published_sparsity():
    """The shares that follow from the definitions at the lengths of the paper's evaluation."""
    assert masks.causal().density(1024) == pytest.approx(1025 / 2048)
    assert masks.sliding_window(32).density(1024) == pytest.approx((1024 * 65 - 32 * 33) / 1024**2)
    assert masks.bigbird(32, 32).density(4096) == pytest.approx(0.13, abs=0.005)


def test_random_blocks_fill_and_seed():
    one, other = (masks.bigbird(0, 0, 0.1, seed=seed).dense(4096) for seed in (0, 1))
    assert float(one.float().mean()) == pytest.approx(0.1, abs=0.01)
    assert not (one == other).all()
    assert float((one & other).float().mean()) == pytest.approx(0.01, abs=0.005)


def test_random_blocks_do_not_depend_on_the_length():
    mask = masks.bigbird(3, 5, 0.4, block=16)
    assert (mask.dense(300, 280)[:97, :113] == mask.dense(97, 113)).all()


def test_splitmix_is_the_published_generator():
    assert splitmix(0) == 0xE220A8397B1DCDAF


REFUSED = [
    (lambda: masks.causal("left"), "align='left' must be 'top-left' or 'bottom-right'"),
    (lambda: masks.sliding_window(-1), "window=-1 must be an integer of at least 0"),
    (lambda: masks.sliding_window(2.5), "window=2.5 must be an integer"),
    (lambda: masks.sliding_window(True), "window=True must be an integer"),
    (lambda: masks.sliding_window(None), "window=None must be an integer"),
    (lambda: masks.dilated_window(3, 0), "dilation=0 must be an integer of at least 1"),
    (lambda: masks.global_tokens(-2), "n_or_indices=-2 must be"),
    (lambda: masks.global_tokens([3, -2]), r"n_or_indices\[1\]=-2 must be"),
    (lambda: masks.global_tokens([0.5]), r"n_or_indices\[0\]=0.5 must be"),
    (lambda: masks.global_tokens("all"), "n_or_indices='all' must be"),
    (lambda: masks.longformer(window=-3), "window=-3 must be"),
    (lambda: masks.longformer(global_tokens=[-1]), r"n_or_indices\[0\]=-1 must be"),
    (lambda: masks.bigbird(random_fill=1.5), "random_fill=1.5 must be a number in 0…1"),
    (lambda: masks.bigbird(random_fill=float("nan")), "random_fill=nan must be a number in 0…1"),
    (lambda: masks.bigbird(random_fill="0.1"), "random_fill='0.1' must be a number in 0…1"),
    (lambda: masks.bigbird(block=0), "block=0 must be an integer of at least 1"),
    (lambda: masks.bigbird(seed=-1), "seed=-1 must be"),
    (lambda: masks.bigbird(seed=2**64), "must be at most 18446744073709551615"),
    (lambda: masks.strided(0), "stride=0 must be an integer of at least 1"),
    (lambda: masks.fixed(4, 5), "summary=5 must be at most stride=4"),
    (lambda: masks.prefix_lm(-1), "n=-1 must be"),
    (lambda: masks.document([]), "document needs at least one length"),
    (lambda: masks.document([4], torch.ones(4, 4) == 1), "inside must be a Mask, got Tensor"),
    (lambda: masks.document([4], masks.padding([3, 4])), "depends on the batch entry, and documents are of one"),
    (lambda: masks.document([4], rest=-1), "rest=-1 must be an integer of at least 0"),
    (lambda: masks.document([4, -4]), r"lengths\[1\]=-4 must be"),
    (lambda: masks.document(7), "lengths=7 must be a sequence of integers"),
    (lambda: masks.vertical_slash(64, 100), "the rule that finds so many of them at run time is masks.runtime"),
    (lambda: masks.padding([]), "padding needs at least one length"),
    (lambda: masks.padding([1.0]), r"lengths\[0\]=1.0 must be"),
    (lambda: masks.a_shape(-1, 2), "sink=-1 must be"),
    (lambda: masks.vertical_slash([1], [-1]), r"slash\[0\]=-1 must be"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message[:30] for _, message in REFUSED])
def test_refused_at_construction(make, message):
    with pytest.raises(MaskError, match=message):
        make()


UNFIT = [
    (masks.document([40, 50]), (97, 97), "document lengths sum to 90, must sum to q_len=97"),
    (masks.document([40, 50]), (90, 97), "document lengths sum to 90, must sum to kv_len=97"),
    (masks.padding([10, 98]), (5, 97), "padding length 98 exceeds kv_len=97"),
    (masks.global_tokens([200]), (97, 113), "global token 200 is past q_len=97 and kv_len=113"),
    (masks.vertical_slash([97], []), (97, 97), "column 97 must be less than kv_len=97"),
    (masks.vertical_slash([], [97]), (97, 200), "distance 97 must be less than q_len=97"),
    (masks.causal(), (0, 5), "q_len=0 must be a positive integer"),
    (masks.causal(), (5, 2.5), "kv_len=2.5 must be a positive integer"),
]


@pytest.mark.parametrize("mask, lengths, message", UNFIT, ids=[message[:30] for *_, message in UNFIT])
def test_refused_at_lengths(mask, lengths, message):
    for use in (mask.dense, mask.compile, mask.density):
        with pytest.raises(MaskError, match=message):
            use(*lengths)


def test_integers_of_numpy_and_torch_are_integers():
    import torch

    assert masks.sliding_window(np.int64(3)) == masks.sliding_window(torch.tensor(3)) == masks.sliding_window(3)
    assert masks.padding(torch.tensor([3, 4])) == masks.padding(np.array([3, 4])) == masks.padding([3, 4])
    assert masks.global_tokens(torch.tensor([4, 1, 4])) == masks.global_tokens({1, 4}) == masks.global_tokens((1, 4))
    assert masks.global_tokens(torch.tensor(4)) == masks.global_tokens(4)
