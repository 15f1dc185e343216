"""Scores capped by tanh: the generated CUDA of the block-wise and row-wise kernels run on the CPU."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tir_kernels.attention.block_wise.test_sinks import BSHD, problem, run
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise.geometry import RowWiseConfig

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def capped(*arguments, **rest):
    return problem(*arguments, **{"scale": 1.0, "softcap": 5.0, "sink_dtype": None, **rest})


WGMMA = BlockWiseConfig(64, 64, 4, 2, warpgroup=True)
CASES = {
    "split rows": (capped(70, 1100), BlockWiseConfig(64, 64, 4, 2)),
    "32 rows a warp, tokens apart": (capped(130, 150, dim=32), BlockWiseConfig(64, 32, 2, 2, 3)),
    "bias": (capped(40, 100, dim=24, bias_shape=(1, 2, 40, 100), layouts=BSHD), BlockWiseConfig(64, 64, 4, 1)),
    "negative scale": (capped(33, 90, dim=16, scale=-0.8, dtype="bfloat16"), BlockWiseConfig(16, 64, 1, 2)),
    "continued, sink": (capped(70, 300, dim=32, continues=True, sink_dtype="float32"), BlockWiseConfig(64, 64, 4, 2)),
    "wgmma": (capped(70, 150, dtype="bfloat16"), WGMMA),
    "wgmma, bias": (capped(70, 150, bias_shape=(1, 1, 1, 150)), WGMMA),
    "row-wise": (capped(5, 203, heads=8, kv_heads=2), RowWiseConfig(4, 3)),
    "row-wise, split": (capped(2, 1200, dim=128, dtype="bfloat16"), RowWiseConfig(2, 2)),
    "row-wise, bias": (capped(3, 90, dim=16, bias_shape=(1, 2, 3, 90)), RowWiseConfig(4, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_are_capped_before_the_bias(name, tmp_path):
    given, config = CASES[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.4
    keep[1] = False  # an empty row
    earlier = keep & (rng.random(keep.shape) < 0.5) & given.continues
    dtype = getattr(torch, given.dtype)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    tensors, arguments = {"q": q, "k": k, "v": v}, {}
    if given.bias_shape:
        tensors["bias"] = torch.from_numpy(rng.standard_normal(given.bias_shape, np.float32))
        tensors["bias"][..., 2] = torch.finfo(torch.float32).min
        arguments["bias"] = tensors["bias"].numpy()
    if given.sink_dtype:
        tensors["sink"] = torch.tensor([1.5, -torch.inf])
        arguments["sink"] = tensors["sink"].numpy()
    inputs = [x.float().numpy() for x in (q, k, v)]
    if given.continues:
        prior, prior_lse = attention_reference(replace(given, sink_dtype=None), *inputs, earlier)
        tensors["prior"] = torch.from_numpy(prior).to(dtype)
        tensors["prior_lse"] = torch.from_numpy(prior_lse.astype(np.float32))
    out, lse, _ = run(given, config, keep & ~earlier, tensors, tmp_path)

    expected, expected_lse = attention_reference(given, *inputs, keep, **arguments)
    np.testing.assert_allclose(out, expected, atol=8 * torch.finfo(dtype).eps, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3 if given.dtype == "float16" else 1e-2, rtol=1e-6)
    plain, _ = attention_reference(replace(given, softcap=None), *inputs, keep, **arguments)
    assert abs(plain - expected).max() > 0.1, "the cap matters here"
