"""A sink in the softmax's denominator: the generated CUDA of all attention kernels run on the CPU."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.problem import AttentionProblem, Layouts
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseConfig, RowWiseGeometry
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_90a")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
BLOCK_WISE_ARRAYS = ("work", "entries", "keep_bits", "partials", "arrivals")
ROW_WISE_ARRAYS = ("work", "columns", "keep_bits", "partials", "arrivals")


def problem(q_len, kv_len=None, dim=64, heads=2, kv_heads=1, dtype="float16", **rest):
    rest = {"scale": dim**-0.5, "gives_lse": True, "sink_dtype": "float32", **rest}
    return AttentionProblem(1, heads, kv_heads, q_len, kv_len or q_len, dim, dim, dtype, **rest)


BSHD = Layouts(*["bshd"] * 4)
CASES = {
    "split rows": (problem(70, 1100), BlockWiseConfig(64, 64, 4, 2)),
    "32 rows a warp, tokens apart": (
        problem(130, 150, dim=32, sink_dtype="bfloat16"),
        BlockWiseConfig(64, 32, 2, 2, 3),
    ),
    "bias": (
        problem(40, 100, dim=24, bias_shape=(1, 2, 40, 100), layouts=BSHD, sink_dtype="float16"),
        BlockWiseConfig(64, 64, 4, 1),
    ),
    "negative scale": (problem(33, 90, dim=16, scale=-0.3, dtype="bfloat16"), BlockWiseConfig(16, 64, 1, 2)),
    "continued, split rows": (problem(70, 1100, dim=32, continues=True), BlockWiseConfig(64, 64, 4, 2)),
    "wgmma": (problem(70, 150), BlockWiseConfig(64, 64, 4, 2, warpgroup=True)),
    "wgmma, continued": (
        problem(130, 190, dim=128, dtype="bfloat16", continues=True),
        BlockWiseConfig(128, 64, 8, 2, warpgroup=True),
    ),
    "row-wise": (problem(5, 203, heads=8, kv_heads=2, sink_dtype="bfloat16"), RowWiseConfig(4, 3)),
    "row-wise, split": (problem(2, 1200, dim=128, dtype="bfloat16"), RowWiseConfig(2, 2)),
    "row-wise, bias": (problem(3, 90, dim=16, bias_shape=(1, 2, 3, 90)), RowWiseConfig(4, 2)),
}


def bits_of(tensor) -> np.ndarray:
    return aligned(tensor.numpy() if tensor.dtype in (torch.float32, torch.int32) else tensor.view(torch.int16).numpy())


def run(given, config, keep, tensors, folder):
    """(out, lse) in float64 of the generated kernel on arrays by name, CTAs in a random order."""
    row_wise = isinstance(config, RowWiseConfig)
    template, names = (row_wise_cuda, ROW_WISE_ARRAYS) if row_wise else (block_wise_cuda, BLOCK_WISE_ARRAYS)
    mask = BlockSparseMask.from_dense(keep, (config.block_m, config.block_n), config.token_stride)
    arrays = dict(zip(names, map(aligned, template.operands(given, config, TARGET, mask).arrays), strict=True))
    arrays |= {name: bits_of(x) for name, x in tensors.items()}
    arrays["partials"][...] = np.nan
    arrays["out"] = aligned(np.full(given.shape("out"), 0x7FFF, np.int16))
    arrays["lse"] = aligned(np.full(given.lse_shape, np.nan, np.float32))
    g = (RowWiseGeometry if row_wise else Geometry)(given, config)
    arch = "sm_90a" if getattr(config, "warpgroup", False) else "sm_80"
    kernel = EmulatedKernel(source(template, given, config, arch), folder)
    order = np.random.default_rng(1).permutation(len(arrays["work"]))
    kernel(arrays, {"n_work": len(order)}, order, g.threads, g.shared_bytes)
    out = torch.from_numpy(arrays["out"]).view(getattr(torch, given.dtype)).double().numpy()
    return out, arrays["lse"].astype(np.float64), arrays["work"]


@pytest.mark.parametrize("name", CASES)
def test_a_sink_counts_once(name, tmp_path):
    given, config = CASES[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.4
    keep[1] = False  # an empty row
    earlier = keep & (rng.random(keep.shape) < 0.5) & given.continues
    if given.continues:
        earlier[20:30] = False  # rows that only this part keeps
        earlier[40:50] = keep[40:50]  # rows that only the earlier part keeps
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    sink = torch.tensor([1.5, -torch.inf, 300.0, -1e30] * 2)[: given.q_heads].to(getattr(torch, given.sink_dtype))
    tensors = {"q": q, "k": k, "v": v, "sink": sink}
    bias = None
    if given.bias_shape:
        tensors["bias"] = bias = torch.from_numpy(rng.standard_normal(given.bias_shape, np.float32))
        bias[..., 2, :] = torch.finfo(torch.float32).min
    inputs = [x.float().numpy() for x in (q, k, v)]
    if given.continues:
        prior, prior_lse = attention_reference(replace(given, sink_dtype=None), *inputs, earlier)
        tensors["prior"] = torch.from_numpy(prior).to(dtype)
        tensors["prior_lse"] = torch.from_numpy(prior_lse.astype(np.float32))
    out, lse, work = run(given, config, keep & ~earlier, tensors, tmp_path)
    assert ("split" in name) == (len(work) > given.q_heads * -(-given.q_len // config.block_m))

    arguments = (None if bias is None else bias.numpy(), sink.double().numpy())
    expected, expected_lse = attention_reference(given, *inputs, keep, *arguments)
    np.testing.assert_allclose(out, expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3 if given.dtype == "float16" else 1e-2, rtol=1e-6)
    empty = out.transpose([given.layouts.out.index(dimension) for dimension in "bhsd"])[:, :, 1]
    assert not empty.any() and lse[0, 0, 1] == float(sink[0]) and np.isneginf(lse[0, 1, 1])


@pytest.mark.parametrize(
    "given, config",
    [
        (problem(40, 70, dim=16, heads=4, kv_heads=2), BlockWiseConfig(64, 64, 4, 2)),
        (problem(3, 70, dim=16, heads=4, kv_heads=2), RowWiseConfig(2, 2)),
    ],
    ids=["block-wise", "row-wise"],
)
def test_extreme_sinks(given, config, tmp_path):
    """The largest and the lowest finite ones are safe; +inf and NaN make their head NaN and no other."""
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.4
    keep[1] = False
    largest = torch.finfo(torch.float32).max
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).half() for x in "qkv")
    sink = torch.tensor([largest, -largest, torch.inf, torch.nan])
    out, lse, _ = run(given, config, keep, {"q": q, "k": k, "v": v, "sink": sink}, tmp_path)
    assert not out[:, 0].any() and (lse[:, 0] == largest).all()
    assert np.isnan(out[:, 2:]).all() and np.isnan(lse[:, 2:]).all()
    inputs = [x.float().numpy() for x in (q, k, v)]
    expected, expected_lse = attention_reference(replace(given, sink_dtype=None), *inputs, keep)
    np.testing.assert_allclose(out[:, 1], expected[:, 1], atol=4e-3)
    kept = keep.any(axis=1)
    np.testing.assert_allclose(lse[:, 1, kept], expected_lse[:, 1, kept], atol=2e-3)
    assert (lse[:, 1, ~kept] == -largest).all()
