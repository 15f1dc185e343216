"""The CUDA row-wise kernel: its lists and its split plan against the dense mask, its generated CUDA run on the CPU
against the reference.  Its sources: tests/gpu/test_all_cases.py."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu.sources import launch_bounds, source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseConfig, RowWiseGeometry
from tir_kernels.attention.row_wise.operands import CTAS, row_wise_operands, split_counts
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.device import H200
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

SM_80, SM_86, SM_90A = (parse_target(f"cuda -arch=sm_{number}") for number in ("80", "86", "90a"))
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(q_len=1, kv_len=300, dim=64, v_dim=None, batch=1, heads=2, kv_heads=None, dtype="float16", **rest):
    rest.setdefault("scale", dim**-0.5)
    return AttentionProblem(batch, heads, kv_heads or heads, q_len, kv_len, dim, v_dim or dim, dtype, **rest)


def compress(keep) -> BlockSparseMask:
    return BlockSparseMask.from_dense(keep, (RowWiseConfig.block_m, RowWiseConfig.block_n))


# -- lists and plan ---------------------------------------------------------------------------------------------------


def decode(operands, problem) -> np.ndarray:
    """The dense mask (batch, q_heads, q_len, kv_len) as the kernel's lanes see it; fails where a token comes twice."""
    work, columns, keep_bits, _, _ = operands
    g = RowWiseGeometry(problem, RowWiseConfig(4, 3))
    seen = np.zeros((problem.batch * problem.kv_heads, g.n_row_tiles * 16, problem.kv_len), np.int32)
    for unit, begin, end, first_part, keep_offset, *_ in work:
        rows = seen[unit // g.n_row_tiles, unit % g.n_row_tiles * 16 :][:16]
        for tile in range(begin, end):
            kept = np.ones((16, 16), bool)
            if tile >= first_part:
                lane, i = np.meshgrid(np.arange(32), np.arange(8), indexing="ij")
                bits = keep_bits[tile + keep_offset, 0, lane, 0] >> i.astype(np.uint32) & 1
                kept[i % 4 // 2 * 8 + lane // 4, i // 4 * 8 + lane % 4 * 2 + i % 2] = bits
            for position, token in enumerate(columns[tile]):
                rows[:, token] += kept[:, position]
    seen = seen[:, : g.rows].reshape(problem.batch, problem.q_heads, problem.q_len, problem.kv_len)
    assert seen.max(initial=0) <= 1
    return seen.astype(bool)


@pytest.mark.parametrize(
    "given, leading",
    [
        (problem(), ()),
        (problem(1, 2000, dim=128, heads=3), ()),
        (problem(5, 700, heads=4, kv_heads=2), ()),
        (problem(16, 130, heads=4, kv_heads=2), (4,)),
        (problem(3, 400, batch=2, heads=6, kv_heads=1), (2, 6)),
        (problem(2, 100, batch=3), (3, 1)),
    ],
)
@pytest.mark.parametrize("density", [0.0, 0.2, 0.9, 1.0])
def test_lanes_see_the_dense_mask(given, leading, density):
    keep = np.random.default_rng(given.kv_len).random((*leading, given.q_len, given.kv_len)) < density
    seen = decode(row_wise_operands(compress(keep), given, H200), given)
    np.testing.assert_array_equal(seen, np.broadcast_to(keep, seen.shape))


def test_tokens_that_all_rows_keep_come_first_and_need_no_keep_bits():
    keep = np.ones((4, 160), bool)
    keep[0, :32] = False
    work, columns, keep_bits, _, _ = row_wise_operands(compress(keep), problem(4, 160), H200)
    assert columns.reshape(-1).tolist() == [*range(32, 160), *range(32)]
    assert work[0, 3] == 8 and len(keep_bits) == 2


def test_equal_row_tiles_share_one_list():
    keep = np.ones((1, 160), bool)
    _, columns, _, _, _ = row_wise_operands(compress(keep), problem(1, 160, batch=3, heads=8, kv_heads=4), H200)
    assert len(columns) == 10
    keep = np.stack([keep, keep, keep, ~keep | (np.arange(160) < 16)])
    _, columns, _, _, _ = row_wise_operands(compress(keep), problem(1, 160, heads=4), H200)
    assert len(columns) == 10 + 1


def test_long_lists_are_split_and_their_records_are_distinct():
    given = problem(1, 32768, dim=128, heads=3)
    keep = np.zeros((3, 1, 32768), bool)
    keep[0], keep[1, :, :300], keep[2, :, ::5] = True, True, True
    work, _, _, partials, arrivals = row_wise_operands(compress(keep), given, H200)
    per_unit = [work[work[:, 0] == unit] for unit in range(3)]
    assert [len(w) for w in per_unit] == [w[0, 6] for w in per_unit]
    assert len(per_unit[0]) > len(per_unit[2]) > 1 == len(per_unit[1])
    for w in per_unit:
        np.testing.assert_array_equal(w[1:, 1], w[:-1, 2])
        assert np.ptp(w[:, 2] - w[:, 1]) <= 1
    slots = np.concatenate([per_unit[0], per_unit[2]])[:, 7]
    assert sorted(slots) == list(range(len(partials))) and len(arrivals) == 3
    for w in (per_unit[0], per_unit[2]):
        assert list(w[:, 7]) == list(range(w[0, 5], w[0, 5] + w[0, 6]))


def test_split_counts_fill_the_gpu_once_and_leave_short_lists_whole():
    given = problem(1, 32768, dim=128, heads=32)
    assert set(split_counts(np.full(32, 13), given, H200)) == {1}
    assert set(split_counts(np.full(32, 512), given, H200)) == {8}  # 9 would be more CTAs than run at once
    uneven = split_counts(np.array([2048] + [100] * 31), given, H200)
    assert uneven.sum() <= CTAS * H200.multiprocessors and uneven[0] > 80
    assert set(split_counts(np.full(512, 512), given, H200)) == {1}
    assert split_counts(np.array([512] * 511 + [4096]), given, H200).tolist() == [1] * 511 + [5]


def test_arrays_are_never_empty_and_the_workspace_is_zero():
    for keep in (np.zeros((1, 64), bool), np.ones((1, 64), bool)):
        operands = row_wise_operands(compress(keep), problem(1, 64), H200)
        assert all(array.size and array.flags.c_contiguous for array in operands)
        assert [a.dtype.name for a in operands] == ["int32", "int32", "uint32", "float32", "uint32"]
        assert not operands[3].any() and not operands[4].any()


# -- the generated CUDA on the CPU ------------------------------------------------------------------------------------


def bits_of(tensor) -> np.ndarray:
    return aligned(tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy())


EMULATED = {
    "ragged, two row tiles": (problem(5, 203, heads=8, kv_heads=2), RowWiseConfig(4, 3), "random"),
    "split": (problem(1, 900, dim=128, heads=1, dtype="bfloat16"), RowWiseConfig(2, 2), "most"),
    "more splits than are merged at once": (problem(2, 1400, dim=256, heads=1), RowWiseConfig(2, 2), "most"),
    "padded heads": (problem(3, 150, dim=40, v_dim=96, heads=1), RowWiseConfig(4, 4), "random"),
    "empty rows": (problem(4, 100, dim=16, heads=2, dtype="bfloat16"), RowWiseConfig(8, 2), "empty rows"),
    "negative scale": (problem(1, 100, dim=32, heads=1, scale=-0.3), RowWiseConfig(2, 3), "random"),
    "bias, split, layouts": (
        problem(
            3, 850, dim=128, batch=2, heads=2, kv_heads=1, bias_shape=(2, 2, 1, 850), layouts=Layouts(*["bshd"] * 4)
        ),
        RowWiseConfig(4, 2),
        "random",
    ),
    "views": (
        problem(
            3,
            400,
            dim=24,
            batch=2,
            heads=2,
            kv_heads=1,
            layouts=Layouts(
                View(2 * 3 * 4 * 24, 48, 3 * 96, 24, 96),
                View(400 * 96, 24, 48, 0, 96),
                View(400 * 96, 0, 0, 0, 96),
                "bshd",
            ),
        ),
        RowWiseConfig(4, 2),
        "random",
    ),
    "bias of finfo.min": (problem(2, 90, dim=16, bias_shape=(1, 2, 2, 90)), RowWiseConfig(4, 2), "lowest"),
}


@needs_gxx
@pytest.mark.parametrize("name", EMULATED)
def test_generated_cuda_computes_attention(name, tmp_path):
    given, config, kind = EMULATED[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < (0.97 if kind == "most" else 0.5)
    if kind == "empty rows":
        keep[1:3] = False
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    bias = None
    if given.bias_shape:
        bias = torch.from_numpy(rng.standard_normal(given.bias_shape, np.float32))
        bias[..., ::3] = float("-inf")
        if kind == "lowest":
            bias[..., 0, :] = torch.finfo(torch.float32).min
    operands = [aligned(a) for a in row_wise_cuda.operands(given, config, SM_90A, compress(keep)).arrays]
    arrays = dict(zip(("work", "columns", "keep_bits", "partials", "arrivals"), operands))
    arrays |= {"q": bits_of(q), "k": bits_of(k), "v": bits_of(v)}
    arrays |= {"bias": bits_of(bias)} if bias is not None else {}
    arrays["out"] = out = aligned(np.full(given.shape("out"), 0x7FFF, np.int16))
    g = RowWiseGeometry(given, config)
    kernel = EmulatedKernel(source(row_wise_cuda, given, config), tmp_path)
    n_work = len(arrays["work"])
    assert ("split" in name) == (n_work > g.n_units)

    results = []
    for _ in range(2 if "split" in name else 1):
        out[...], arrays["partials"][...] = 0x7FFF, np.nan
        kernel(arrays, {"n_work": n_work}, rng.permutation(n_work), g.threads, g.shared_bytes)
        assert not arrays["arrivals"].any(), "the next launch must find what this one found"
        results.append(torch.from_numpy(out.copy()).view(dtype).double().numpy())
    np.testing.assert_array_equal(results[0], results[-1])

    inputs = [x.float().numpy() for x in (q, k, v)]
    expected = attention_reference(given, *inputs, keep, None if bias is None else bias.numpy())
    np.testing.assert_allclose(results[0], expected, atol=2 * torch.finfo(dtype).eps, rtol=0)


def test_large_caches_are_indexed_with_64_bits():
    small, large = (
        source(row_wise_cuda, problem(1, 32768, 128, batch=b, heads=32), RowWiseConfig(4, 3)) for b in (1, 16)
    )
    assert "(int64_t)k_tokens_ptr" in large and "(int64_t)k_tokens_ptr" not in small


def test_kernel_promises_the_occupancy_of_its_geometry():
    g = RowWiseGeometry(problem(), RowWiseConfig(4, 3))
    assert launch_bounds(source(row_wise_cuda, problem(), RowWiseConfig(4, 3))) == (
        g.threads,
        g.ctas_per_multiprocessor,
    )


# -- the interface ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"q_len": 17}, "q_len=17 is more than 16 queries"),
        ({"dim": 36}, "head_dim=36 must be a multiple of 8"),
        ({"v_dim": 4}, "v_head_dim=4 must be a multiple of 8"),
        ({"batch": 1 << 20, "heads": 64}, "32-bit"),
    ],
)
def test_unsupported_problems_name_value_and_rule(changes, words):
    assert words in row_wise_cuda.unsupported(problem(**changes), SM_80)


@pytest.mark.parametrize("dim", [8, 16, 32, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("target", [SM_80, SM_86], ids=["sm_80", "sm_86"])
def test_every_multiple_of_8_up_to_256_is_supported(dim, target):
    given = problem(dim=dim)
    assert row_wise_cuda.unsupported(given, target) is None
    configs = row_wise_cuda.configs(given, target)
    limit = int(target.attrs["max_shared_memory_per_block"])
    assert all(RowWiseGeometry(given, c).shared_bytes <= limit for c in configs)
    assert len(set(configs)) == len(configs) == len({c.label for c in configs})


def test_kernel_declares_what_relax_needs():
    with quick_script():
        func = row_wise_cuda.instantiate(problem(bias_shape=(1, 2, 1, 300)), RowWiseConfig(4, 3), SM_80)
    assert [func.attrs[k] for k in ("tirx.noalias", "op_pattern", "tirx.is_scheduled")] == [True, 8, True]
    assert len(func.params) == 10  # q, k, v, bias, work, columns, keep_bits, partials, arrivals, out
