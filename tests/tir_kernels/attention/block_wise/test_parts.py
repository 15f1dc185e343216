"""Tokens taken apart, results continued and log-sum-exp given: the generated CUDA run on the CPU."""

import shutil

import numpy as np
import pytest
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig, Geometry
from tir_kernels.attention.problem import AttentionProblem, Layouts
from tir_kernels.attention.reference import attention_reference
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def problem(q_len, kv_len=None, dim=32, heads=1, kv_heads=None, dtype="float16", **rest):
    rest = {"scale": dim**-0.5, "gives_lse": True, **rest}
    return AttentionProblem(1, heads, kv_heads or heads, q_len, kv_len or q_len, dim, dim, dtype, **rest)


BSHD = Layouts("bshd", "bshd", "bshd", "bshd")
CASES = {
    "classes of whole blocks": (problem(192), BlockWiseConfig(64, 64, 4, 2, 3)),
    "ragged classes": (problem(181, 230), BlockWiseConfig(64, 32, 4, 2, 7)),
    "more classes than tokens in one": (problem(40), BlockWiseConfig(64, 64, 4, 1, 12)),
    "bias, layouts, shared heads": (
        problem(90, 140, heads=2, kv_heads=1, bias_shape=(1, 2, 90, 140), layouts=BSHD),
        BlockWiseConfig(64, 32, 2, 3, 2),
    ),
    "continued": (problem(130, 190, continues=True), BlockWiseConfig(64, 64, 4, 2, 5)),
    "continued, split rows": (problem(70, 1100, continues=True), BlockWiseConfig(64, 64, 4, 2)),
    "continued, bfloat16, negative scale": (
        problem(90, 100, dtype="bfloat16", scale=-0.3, continues=True, layouts=BSHD, heads=2),
        BlockWiseConfig(128, 32, 4, 2, 3),
    ),
    "odd head": (problem(70, 90, dim=24, continues=True), BlockWiseConfig(64, 32, 4, 2)),
}


WGMMA = {
    "wgmma": (problem(130, dim=64), BlockWiseConfig(64, 64, 4, 2, warpgroup=True)),
    "wgmma, large heads, split rows": (problem(70, 1100, dim=128), BlockWiseConfig(64, 32, 4, 2, warpgroup=True)),
    "wgmma, two warpgroups, bfloat16": (
        problem(200, 300, dim=64, dtype="bfloat16"),
        BlockWiseConfig(128, 128, 8, 2, 3, warpgroup=True),
    ),
    "wgmma, continued": (problem(130, 190, dim=128, continues=True), BlockWiseConfig(128, 64, 8, 1, warpgroup=True)),
}
CASES |= WGMMA


def bits_of(tensor) -> np.ndarray:
    return aligned(tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy())


@pytest.mark.parametrize("name", CASES)
def test_result_and_log_sum_exp(name, tmp_path):
    given, config = CASES[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.4
    keep[3:9] = False  # empty rows
    earlier = keep & (rng.random(keep.shape) < 0.5) & given.continues
    earlier[20:30] = False  # rows that only this part keeps
    later = keep & ~earlier
    later[40:50], earlier[40:50] = False, keep[40:50]  # rows that only the earlier part keeps
    if not given.continues:
        later, earlier = keep, earlier & False
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    bias = rng.standard_normal(given.bias_shape, np.float32) if given.bias_shape else None
    inputs = [x.float().numpy() for x in (q, k, v)]
    mask = BlockSparseMask.from_dense(later, (config.block_m, config.block_n), config.token_stride).validate()
    assert (mask.to_dense()[0, 0] == later).all()
    names = ("work", "entries", "keep_bits", "partials", "arrivals")
    arrays = dict(
        zip(
            names,
            map(aligned, block_wise_cuda.operands(given, config, parse_target("cuda -arch=sm_90a"), mask).arrays),
            strict=True,
        )
    )
    assert name != "continued, split rows" or (arrays["work"][:, 6] > 1).any()
    arrays |= {"q": bits_of(q), "k": bits_of(k), "v": bits_of(v)}
    if bias is not None:
        arrays["bias"] = aligned(bias)
    if given.continues:
        prior, prior_lse = attention_reference(given, *inputs, earlier)
        arrays["prior"] = bits_of(torch.from_numpy(prior).to(dtype))
        arrays["prior_lse"] = aligned(prior_lse.astype(np.float32))
    arrays["out"] = aligned(np.full(given.shape("out"), 0x7FFF, np.int16))
    arrays["lse"] = aligned(np.full(given.lse_shape, np.nan, np.float32))
    g, n_work = Geometry(given, config), len(arrays["work"])
    arch = "sm_90a" if config.warpgroup else "sm_80"
    kernel = EmulatedKernel(source(block_wise_cuda, given, config, arch), tmp_path)
    kernel(arrays, {"n_work": n_work}, rng.permutation(n_work), g.threads, g.shared_bytes)

    expected, expected_lse = attention_reference(given, *inputs, keep, bias)
    result = torch.from_numpy(arrays["out"]).view(dtype).double().numpy()
    np.testing.assert_allclose(result, expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
    np.testing.assert_allclose(arrays["lse"], expected_lse, atol=2e-3 if given.dtype == "float16" else 1e-2, rtol=0)
    assert np.isneginf(arrays["lse"][..., 3:9]).all()
