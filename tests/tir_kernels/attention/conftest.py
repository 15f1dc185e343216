"""Fixtures of the CPU kernel tests: operands of a problem, and a kernel run that compiles each problem once."""

import functools

import numpy as np
import pytest
import torch
import tvm

from tir_kernels.attention.cpu import block_wise as block_wise_cpu
from tir_kernels.attention.cpu import row_wise as row_wise_cpu
from tir_kernels.compiling.cpu_threads import use_all_cores
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target

CPU_TEMPLATES = {template.NAME: template for template in (block_wise_cpu, row_wise_cpu)}


@pytest.fixture(params=CPU_TEMPLATES)
def template(request):
    """Each CPU kernel template in turn."""
    return CPU_TEMPLATES[request.param]


@functools.lru_cache(maxsize=64)
def _compiled(name, problem, config, target: str):
    """The kernel for a target given as JSON: two `Target`s of one text are not equal."""
    use_all_cores()
    target = parse_target(target)
    with quick_script():
        function = CPU_TEMPLATES[name].instantiate(problem, config, target)
    return tvm.compile(function, target=target)[function.attrs["global_symbol"]]


@pytest.fixture(scope="session")
def run_kernel():
    """run_kernel(template, problem, keep, tensors, config=None, target="llvm") → output tensor of torch.

    Or (output, log-sum-exp) where the problem gives that.  `tensors` are q, k, v and perhaps bias and sink; `out` may
    be given to be written in place.
    """

    def run(template, problem, keep, tensors, config=None, target="llvm", out=None):
        target = parse_target(target)
        config = config or template.configs(problem, target)[0]
        mask = BlockSparseMask.from_dense(keep, (config.block_m, config.block_n))
        operands = [tvm.runtime.tensor(a) for a in template.operands(problem, config, target, mask).arrays]
        if out is None:
            out = torch.full(problem.shape("out"), float("nan"), dtype=getattr(torch, problem.dtype))
        lse = [torch.full(problem.lse_shape, float("nan"))] if problem.gives_lse else []
        _compiled(template.NAME, problem, config, str(target))(*tensors, *operands, out, *lse)
        return (out, *lse) if lse else out

    return run


@pytest.fixture(scope="session")
def make_operands():
    """make_operands(problem, seed=0) → q, k, v of unit normal elements, as torch tensors of the problem's dtype."""

    def make(problem, seed=0):
        rng = np.random.default_rng(seed)
        dtype = getattr(torch, problem.dtype)
        return [torch.from_numpy(rng.standard_normal(problem.shape(x), dtype=np.float32)).to(dtype) for x in "qkv"]

    return make
