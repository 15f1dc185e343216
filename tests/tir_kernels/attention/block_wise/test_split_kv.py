"""Block rows that are split among CTAs: the plan against the mask's lists, and the generated CUDA run on the CPU."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.block_wise.work import (
    MOST_SPLITS,
    Item,
    ctas_at_once,
    heads_per_group,
    plan_work,
    split_counts,
)
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.cuda.device import H200
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(q_len, kv_len=None, dim=64, batch=1, heads=1, kv_heads=None, dtype="float16", **rest):
    rest = {"scale": dim**-0.5, **rest}
    return AttentionProblem(batch, heads, kv_heads or heads, q_len, kv_len or q_len, dim, dim, dtype, **rest)


def longformer(length) -> np.ndarray:
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    return (abs(i - j) <= 32) | (i < 32) | (j < 32)


# -- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch, heads, kv_heads, length", [(1, 2, 2, 64), (3, 5, 1, 1300), (2, 12, 4, 8192)])
def test_every_listed_block_of_every_head_is_computed_once(batch, heads, kv_heads, length):
    keep = longformer(length)
    if heads < 12:
        keep = np.stack([keep] * (heads - 1) + [np.eye(length, dtype=bool)])
    mask = BlockSparseMask.from_dense(keep, (64, 64))
    given = problem(length, batch=batch, heads=heads, kv_heads=kv_heads)
    work, n_slots = plan_work(mask, given, H200)
    patterns = mask.head_map(batch, heads).reshape(-1)
    seen = np.zeros((batch * heads, len(mask.load_col_idx)), int)
    for begin, end, first_key, _, head, first_row, _, _ in work:
        row = patterns[head] * mask.n_block_rows + first_row // 64
        assert mask.load_row_ptr[row] <= begin <= end <= mask.load_row_ptr[row + 1]
        assert begin == end or first_key == 64 * mask.load_col_idx[begin]
        seen[head, begin:end] += 1
    of_pattern = np.repeat(np.arange(mask.n_patterns), np.diff(mask.load_row_ptr[:: mask.n_block_rows]))
    np.testing.assert_array_equal(seen, patterns[:, None] == of_pattern)
    split = work[work[:, Item.SPLITS] > 1]
    assert sorted(split[:, Item.SLOT]) == list(range(n_slots))
    for first in np.unique(split[:, Item.FIRST_SLOT]):
        row = split[split[:, Item.FIRST_SLOT] == first]
        shared = row[:, [Item.HEAD, Item.FIRST_ROW, Item.SPLITS]]
        assert len(row) == row[0, Item.SPLITS] and len(np.unique(shared, axis=0)) == 1


def test_heavy_rows_of_all_heads_come_first_then_groups_of_heads():
    mask = BlockSparseMask.from_dense(np.tril(np.ones((128 * 64, 128 * 64), bool)), (64, 64))
    given = problem(8192, heads=24, dim=128)
    work, n_slots = plan_work(mask, given, H200)
    assert n_slots == 0 and heads_per_group(given, H200) == 4
    assert work[:48, Item.HEAD].tolist() == [*range(24)] * 2
    assert work[:48, Item.FIRST_ROW].tolist() == [127 * 64] * 24 + [126 * 64] * 24
    assert work[48:56, Item.HEAD].tolist() == [0, 1, 2, 3] * 2


def test_what_continues_an_earlier_part_begins_with_the_heads_that_it_ended_with():
    mask = BlockSparseMask.from_dense(np.eye(8192, dtype=bool), (64, 64))
    first, rest = (
        plan_work(mask, problem(8192, heads=24, dim=128, continues=continues), H200)[0] for continues in (False, True)
    )
    heaviest = 48  # of all heads
    assert rest[:heaviest].tolist() == first[:heaviest].tolist()
    groups = [work[heaviest:, Item.HEAD].reshape(6, -1) // 4 for work in (first, rest)]
    assert (groups[0] == np.arange(6)[:, None]).all() and (groups[1] == groups[0][::-1]).all()
    assert sorted(map(tuple, first)) == sorted(map(tuple, rest))


def test_only_rows_far_above_the_fair_share_are_split():
    assert split_counts(np.full(12, 9), 64, ctas_at_once(64, H200)).tolist() == [5] * 12
    assert (
        split_counts(np.full(12, 6), 64, ctas_at_once(64, H200)).tolist() == [1] * 12
    )  # merging would cost what it saves
    assert split_counts(np.array([128] * 8 + [5] * 8000), 64, ctas_at_once(64, H200)).tolist() == [2] * 8 + [1] * 8000
    assert split_counts(np.array([4096, 1, 0]), 64, ctas_at_once(64, H200)).tolist() == [MOST_SPLITS, 1, 1]
    assert split_counts(np.full(10000, 64), 64, ctas_at_once(64, H200)).max() == 1
    assert (
        split_counts(np.full(48, 9), 64, ctas_at_once(16, H200)).tolist() == [5] * 48
    )  # as many rows in four times as many CTAs


# -- the generated CUDA on the CPU ------------------------------------------------------------------------------------


def bits_of(tensor) -> np.ndarray:
    return aligned(tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy())


EMULATED = {
    "global rows": (problem(70, 1100), BlockWiseConfig(64, 64, 4, 2)),
    "32 rows a warp, bfloat16": (problem(130, 700, dim=32, dtype="bfloat16"), BlockWiseConfig(64, 32, 2, 1)),
    "one warp of 16 rows": (problem(40, 900, dim=64), BlockWiseConfig(16, 64, 1, 2)),
    "one warp of 32 rows": (problem(70, 900, dim=80, dtype="bfloat16"), BlockWiseConfig(32, 32, 1, 3)),
    "two warps": (problem(33, 900, dim=128), BlockWiseConfig(32, 128, 2, 2)),
    "large heads": (problem(64, 1300, dim=256), BlockWiseConfig(64, 32, 4, 1)),
    "bias and layouts": (
        problem(
            40,
            800,
            dim=24,
            heads=2,
            kv_heads=1,
            bias_shape=(1, 2, 40, 1),
            layouts=Layouts("bshd", "bhsd", "bshd", "bshd"),
        ),
        BlockWiseConfig(64, 64, 4, 3),
    ),
    "views": (
        problem(
            40,
            800,
            dim=24,
            batch=2,
            heads=2,
            kv_heads=1,
            layouts=Layouts(
                View(2 * 40 * 4 * 24, 48, 40 * 96, 24, 96),
                View(800 * 96, 24, 48, 0, 96),
                View(800 * 96, 0, 0, 0, 96),
                "bshd",
            ),
        ),
        BlockWiseConfig(64, 32, 4, 2),
    ),
}


@needs_gxx
@pytest.mark.parametrize("name", EMULATED)
def test_splits_merge_to_the_whole_row_in_any_order(name, tmp_path):
    given, config = EMULATED[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.5
    keep[:16, : given.kv_len // 2] = True
    keep[3:9] = False  # empty rows
    keep[20, : given.kv_len - 40] = False  # kept by one split only
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    mask = BlockSparseMask.from_dense(keep, (config.block_m, config.block_n))
    names = ("work", "entries", "keep_bits", "partials", "arrivals")
    arrays = dict(
        zip(
            names,
            map(aligned, block_wise_cuda.operands(given, config, parse_target("cuda -arch=sm_90a"), mask).arrays),
            strict=True,
        )
    )
    assert (arrays["work"][:, 6] > 1).any()
    arrays |= {"q": bits_of(q), "k": bits_of(k), "v": bits_of(v)}
    bias = None
    if given.bias_shape:
        bias = torch.from_numpy(rng.standard_normal(given.bias_shape, np.float32))
        bias[..., 30:34, :] = torch.finfo(torch.float32).min
        arrays["bias"] = bits_of(bias)
    arrays["out"] = out = aligned(np.full(given.shape("out"), 0x7FFF, np.int16))
    kernel = EmulatedKernel(source(block_wise_cuda, given, config), tmp_path)
    g, n_work = Geometry(given, config), len(arrays["work"])

    results = []
    for _ in range(2):
        out[...], arrays["partials"][...] = 0x7FFF, np.nan
        kernel(arrays, {"n_work": n_work}, rng.permutation(n_work), g.threads, g.shared_bytes)
        assert not arrays["arrivals"].any(), "the next launch must find what this one found"
        results.append(torch.from_numpy(out.copy()).view(dtype).double().numpy())
    np.testing.assert_array_equal(results[0], results[1])
    inputs = [x.float().numpy() for x in (q, k, v)]
    expected = attention_reference(given, *inputs, keep, None if bias is None else bias.numpy())
    np.testing.assert_allclose(results[0], expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
