"""float32 attention: the generated CUDA of a kernel run on the CPU, and the errors that are allowed."""

from dataclasses import replace

import numpy as np
import torch

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import Geometry
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.row_wise.geometry import RowWiseGeometry
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.problems import attention
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_90a")
NAMES = {
    block_wise_cuda: ("work", "entries", "keep_bits", "partials", "arrivals"),
    row_wise_cuda: ("work", "columns", "keep_bits", "partials", "arrivals"),
}


def problem(q_len, kv_len=None, dim=64, v_dim=None, batch=1, heads=1, kv_heads=None, float32="ieee", **rest):
    rest = {"scale": dim**-0.5, **rest}
    sizes = batch, heads, kv_heads or heads, q_len, kv_len or q_len, dim, v_dim or dim
    return AttentionProblem(*sizes, "float32", float32=float32, **rest)


def tf32(x: torch.Tensor) -> torch.Tensor:
    """Rounded to the nearest tf32, away from zero if two are as near."""
    rounded = (x.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x)


def make_inputs(given, seed=0) -> list[torch.Tensor]:
    """Unit normal q, k, v, [bias], [sink], [prior, prior_lse]."""
    generator = torch.Generator().manual_seed(seed)
    specs = [(given.shape(name), "float32") for name in "qkv"]
    specs += [(given.bias_shape, given.bias_dtype)] if given.bias_shape is not None else []
    specs += [((given.q_heads,), given.sink_dtype)] if given.sink_dtype is not None else []
    specs += [(given.shape("out"), "float32"), (given.lse_shape, "float32")] if given.continues else []
    return [torch.randn(shape, generator=generator).to(getattr(torch, dtype)) for shape, dtype in specs]


def emulated(template, given, config, keep, inputs, folder) -> list[torch.Tensor]:
    """[out] or [out, lse] of a kernel, CTAs in random order; a second launch gives the same."""
    mask = BlockSparseMask.from_dense(keep, (config.block_m, config.block_n), config.token_stride)
    operands = template.operands(given, config, TARGET, mask).arrays
    arrays = dict(zip(NAMES[template], map(aligned, operands), strict=True))
    names = ["q", "k", "v"] + ["bias"] * (given.bias_shape is not None) + ["sink"] * (given.sink_dtype is not None)
    names += ["prior", "prior_lse"] * given.continues
    arrays |= {name: aligned(x.numpy()) for name, x in zip(names, inputs, strict=True)}
    outputs = {"out": aligned(np.zeros(given.shape("out"), np.float32))}
    if given.gives_lse:
        outputs["lse"] = aligned(np.zeros(given.lse_shape, np.float32))
    g = (Geometry if template is block_wise_cuda else RowWiseGeometry)(given, config)
    kernel, n_work = EmulatedKernel(source(template, given, config), folder), len(arrays["work"])
    results, rng = [], np.random.default_rng(0)
    for _ in range(2):
        for x in outputs.values():
            x[...] = np.nan
        arrays["partials"][...] = np.nan
        kernel(arrays | outputs, {"n_work": n_work}, rng.permutation(n_work), g.threads, g.shared_bytes)
        assert not arrays["arrivals"].any(), "the next launch must find what this one found"
        results.append([torch.from_numpy(x.copy()) for x in outputs.values()])
    assert all(torch.equal(*both) for both in zip(*results)) or any(x.isnan().any() for x in results[0])
    return results[0]


def expected(given, keep, inputs, dtype=torch.float64) -> list[torch.Tensor]:
    """The definition in `dtype`; in float32 with operands rounded to tf32, if the problem says so."""
    inputs = [x.to(dtype) for x in inputs]
    plain = replace(given, float32="ieee")
    if dtype == torch.float32 and given.float32 == "tf32":
        inputs[:3] = map(tf32, inputs[:3])
    keep = torch.from_numpy(keep.reshape((1,) * (4 - keep.ndim) + keep.shape))
    return attention.reference(plain, inputs, torch, keep)


def allowed(given, keep, inputs) -> float:
    """Twice the error of PyTorch's float32 or tf32, or 2^-20: what sums of few products may differ by."""
    exact, rounded = (expected(given, keep, inputs, dtype)[0] for dtype in (torch.float64, torch.float32))
    return max(2 * float((rounded - exact).abs().max()), 2.0**-20)


def assert_emulated(template, given, config, keep, folder, inputs=None):
    """The kernel's CUDA on the CPU is as exact as PyTorch."""
    inputs = make_inputs(given) if inputs is None else inputs
    actual = emulated(template, given, config, keep, inputs, folder)
    exact = expected(given, keep, inputs)
    error = float((actual[0] - exact[0]).abs().max())
    assert error <= allowed(given, keep, inputs), (error, allowed(given, keep, inputs))
    for lse, exact_lse in zip(actual[1:], exact[1:]):
        torch.testing.assert_close(
            lse.double(), exact_lse.double(), rtol=0, atol=1e-5 if given.float32 == "ieee" else 4e-3
        )
    return error
