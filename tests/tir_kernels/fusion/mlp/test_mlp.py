"""Two products in one CUDA kernel: its generated CUDA run on the CPU against NumPy; what it refuses; its space."""

import shutil

import numpy as np
import pytest
import torch
import tvm

from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.kernels import assert_close, make_inputs, mlp
from tir_kernels.errors import InputError
from tir_kernels.fusion.mlp import mlp as mlp_cuda
from tir_kernels.fusion.mlp.geometry import MlpConfig, MlpGeometry
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, Step
from tir_kernels.fusion.reference import fusion_reference
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
SCALE, GAIN = Step("scale", value=0.5), Step("multiply", "row")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")


def run_emulated(problem, config, inputs, folder) -> np.ndarray:
    """float64 out of generated CUDA on the CPU, CTAs in random order."""
    g, second_w = MlpGeometry(problem, config), len(problem.first.inputs)
    operands = (f"operand{i}" for i in range(len(inputs)))
    names = [{0: "a", 1: "w", second_w: "w2"}.get(i) or next(operands) for i in range(len(inputs))]
    arrays = {name: aligned(x.view(torch.int16).numpy()) for name, x in zip(names, inputs)}
    out = arrays["out"] = aligned(np.full((problem.m, problem.n), 0x7FFF, np.int16))
    kernel = EmulatedKernel(source(mlp_cuda, problem, config), folder)
    kernel(arrays, {}, np.random.default_rng(0).permutation(g.ctas), g.threads, g.shared_bytes)
    return torch.from_numpy(out.copy()).view(getattr(torch, problem.dtype)).double().numpy()


@needs_gxx
@pytest.mark.parametrize(
    "problem, config",
    [
        # Rows, columns, k and inner that end within a block.
        (mlp(70, 104, 72, 136), MlpConfig(32, 64, 1, 4, 3)),
        # Parts of the columns, of which the last is the shortest; the columns of the first product in two tiles.
        (mlp(17, 72, 264, 200, (BIAS, GATE, Step("silu")), dtype="bfloat16"), MlpConfig(16, 64, 1, 4, 4, 2)),
        # Several rows of warps; neither steps nor ends.
        (mlp(128, 64, 64, 128, (), ()), MlpConfig(64, 128, 2, 4, 2)),
        # Less than a block of everything, and fewer blocks than stages.
        (mlp(3, 8, 8, 8, (SCALE, GAIN, Step("relu")), (RESIDUAL, GATE, GATE, BIAS)), MlpConfig(16, 64, 1, 4, 6)),
    ],
    ids=["ragged", "parts", "plain", "tiny"],
)  # fmt: skip
def test_agrees_with_the_definition(problem, config, tmp_path):
    inputs = make_inputs(problem.first) + make_inputs(problem.second, seed=1)[1:]
    count = len(problem.first.inputs)
    (inner,) = fusion_reference(problem.first, *(x.double() for x in inputs[:count]))
    inner = torch.from_numpy(inner).to(inputs[0].dtype).double()  # as the kernel keeps it
    expected = fusion_reference(problem.second, inner, *(x.double() for x in inputs[count:]))
    assert_close(problem, [run_emulated(problem, config, inputs, tmp_path)], expected)


@pytest.mark.parametrize(
    "problem, why",
    [
        (mlp(64, 768, 3072, 768), "the first product has n=3072 columns, more than 512"),
        (mlp(64, 768, 64, 768, norm=Norm("layer_norm", 1e-5)), "layer_norm needs whole rows"),
        (mlp(64, 768, 64, 768, w_layout="kn"), "w_layout='kn'"),
        (mlp(64, 768, 64, 768, (BIAS, GATE, GATE)), "3 operands of a product's steps, more than 2"),
        (mlp(64, 768, 64, 768, steps=(GATE,) * 5), "5 operands of a product's steps, more than 4"),
        (mlp(64, 768, 60, 768), "n=60 must be a multiple of 8"),
        (mlp(64, 768, 64, 768, dtype="float32"), "it computes in float16 or bfloat16"),
        (GemmProblem(64, 64, "float16", k=64), "it is not two matrix products"),
    ],
)
def test_what_it_refuses(problem, why):
    assert why in mlp_cuda.unsupported(problem, SM_80)


def test_a_target_with_too_little_shared_memory_is_refused():
    small = tvm.target.Target({"kind": "cuda", "arch": "sm_80", "max_shared_memory_per_block": 16384})
    assert mlp_cuda.unsupported(mlp(64, 768, 64, 768), small) == "no configuration fits the shared memory of sm_80"


def test_problems_that_do_not_fit_each_other_are_refused():
    first = GemmProblem(8, 16, "float16", k=32)
    for second, why in (
        (GemmProblem(9, 32, "float16", k=16), "m=9 of the second product must be 8"),
        (GemmProblem(8, 32, "float16", k=24), "k=24 of the second product must be 16"),
        (GemmProblem(8, 32, "bfloat16", k=16), "dtype='bfloat16' of the second product must be 'float16'"),
    ):
        with pytest.raises(InputError, match=why):
            MlpProblem(first, second)
    with pytest.raises(InputError, match="rms_norm between two products"):
        MlpProblem(GemmProblem(8, 16, "float16", norm=Norm("rms_norm", 1e-6), k=32), GemmProblem(8, 8, "float16", k=16))
