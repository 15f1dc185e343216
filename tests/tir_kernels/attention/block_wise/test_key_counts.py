"""A number of keys that is known at run time: the generated CUDA of the block-wise kernel run on the CPU."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.tir_kernels.attention.block_wise.test_sinks import TARGET, problem, run
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.reference import attention_reference
from tir_kernels.attention.row_wise import kernel as row_wise_cuda

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
CASES = {
    "one count": (problem(70, 150, dim=32, sink_dtype=None, key_counts=1), BlockWiseConfig(64, 32, 4, 2), [77]),
    "each entry, three stages": (
        replace(problem(40, 200, dim=16, sink_dtype=None), batch=3, key_counts=3),
        BlockWiseConfig(32, 64, 2, 3),
        [1, 200, 64],
    ),
    "split rows, sink": (problem(70, 1100, key_counts=1), BlockWiseConfig(64, 64, 4, 2), [700]),
    "tokens apart, one stage": (
        problem(130, 150, dim=32, sink_dtype=None, key_counts=1),
        BlockWiseConfig(64, 32, 2, 1, 3),
        [101],
    ),
    "bias": (
        problem(40, 100, dim=24, bias_shape=(1, 2, 40, 100), sink_dtype=None, key_counts=1),
        BlockWiseConfig(64, 64, 4, 1),
        [65],
    ),
    "wgmma": (
        problem(70, 150, sink_dtype=None, key_counts=1),
        BlockWiseConfig(64, 64, 4, 2, warpgroup=True),
        [63],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_keys_from_the_count_on_take_no_part(name, tmp_path):
    given, config, counts = CASES[name]
    rng = np.random.default_rng(0)
    keep = rng.random((given.q_len, given.kv_len)) < 0.4
    keep[5:, :96] = True
    keep[1] = False
    dtype, counts = getattr(torch, given.dtype), np.array(counts, np.int32)
    q, k, v = (torch.from_numpy(rng.standard_normal(given.shape(x), np.float32)).to(dtype) for x in "qkv")
    inputs = [x.float().numpy() for x in (q, k, v)]
    for b in range(given.batch):  # what lies there is no number
        n = counts[given.key_count_index(b)]
        k[b, :, n::2], k[b, :, n + 1 :: 2] = torch.nan, torch.inf
    tensors = {"q": q, "k": k, "v": v, "key_count": torch.from_numpy(counts)}
    bias = sink = None
    if given.bias_shape:
        bias = rng.standard_normal(given.bias_shape, np.float32)
        tensors["bias"] = torch.from_numpy(bias)
    if given.sink_dtype:
        sink = np.array([1.5, -np.inf], np.float32)
        tensors["sink"] = torch.from_numpy(sink)
    out, lse, _ = run(given, config, keep, tensors, tmp_path)
    expected, expected_lse = attention_reference(given, *inputs, keep, bias, sink, counts)
    np.testing.assert_allclose(out, expected, atol=4 * torch.finfo(dtype).eps, rtol=0)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-3, rtol=1e-6)


def test_the_row_wise_kernel_refuses():
    reason = row_wise_cuda.unsupported(problem(3, 90, sink_dtype=None, key_counts=1), TARGET)
    assert reason == "reads no key count that is known at run time"
