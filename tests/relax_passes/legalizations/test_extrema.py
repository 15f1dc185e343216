"""relu, clip, maximum, minimum and the reductions to them keep NaN, on the CPU; CUDA has no fmax and no fmin."""

import math

import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from tvm import relax, tirx

from relax_passes.schedule.cpu import cpu_passes
from relax_passes.schedule.cuda import cuda_passes
from tests.models.quick_llvm import QUICK_LLVM, run_linked
from tests.relax_passes.fusion.modules import module_of
from tir_kernels.target import parse_target

op = relax.op
ROWS, COLUMNS = 6, 33  # a ragged row of vectors

OPERATORS = {
    "relu": (lambda x, y: op.nn.relu(x), lambda x, y: F.relu(x)),
    "relu6": (lambda x, y: op.nn.relu6(x), lambda x, y: F.relu6(x)),
    "clip": (lambda x, y: op.clip(x, -0.5, 0.75), lambda x, y: x.clamp(-0.5, 0.75)),
    "maximum": (op.maximum, torch.maximum),
    "minimum": (lambda x, y: op.minimum(y, x), lambda x, y: torch.minimum(y, x)),
    "at least": (lambda x, y: op.maximum(x, number(x, 0.25)), lambda x, y: x.clamp(min=0.25)),
    "at most": (lambda x, y: op.minimum(number(x, 0.25), x), lambda x, y: x.clamp(max=0.25)),
    "at least NaN": (lambda x, y: op.maximum(x, number(x, math.nan)), lambda x, y: x * math.nan),
    "max of rows": (lambda x, y: op.max(x, [1]), lambda x, y: x.amax(1)),
    "min of columns": (lambda x, y: op.min(x, [0], True), lambda x, y: x.amin(0, True)),
    "max of all": (lambda x, y: op.max(x), lambda x, y: x.amax()),
    "max of all numbers": (lambda x, y: op.max(op.nn.relu(y)), lambda x, y: y.relu().amax()),
    "argmax": (lambda x, y: op.argmax(x, 1), lambda x, y: x.argmax(1)),
    "argmin": (lambda x, y: op.argmin(x, 0), lambda x, y: x.argmin(0)),
}


def number(like, value):
    return relax.const(value, str(like.ty.dtype))


def module(dtype: str) -> tvm.IRModule:
    x = relax.Var("x", relax.TensorType((ROWS, COLUMNS), dtype))
    y = relax.Var("y", relax.TensorType((COLUMNS,), dtype))

    def body(builder):
        normal = lambda expr: builder.emit(builder.normalize(expr))
        return relax.Tuple([normal(ours(x, y)) for ours, _ in OPERATORS.values()])

    return module_of([x, y], body)


def values(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with NaN at the beginning, at the end, of either sign, beside infinities, and with none."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLUMNS, generator=generator)
    x[0, 0], x[1, -1], x[2, 7] = math.nan, math.nan, -math.nan
    x[3, 3], x[4] = math.inf, -math.inf
    x[2, 9] = math.inf
    return x.to(getattr(torch, dtype)), torch.randn(COLUMNS, generator=generator).to(getattr(torch, dtype))


@pytest.fixture(scope="module", params=["float32", "float16", "bfloat16", "float64"])
def results(request):
    """(ours, PyTorch's) of every operator, by name."""
    mod, inputs = module(request.param), values(request.param)
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(mod)
        program = run_linked(tvm.compile(mod, target=QUICK_LLVM))["main"]
    ours = program(*(tvm.runtime.from_dlpack(x) for x in inputs))
    return {
        name: (torch.from_dlpack(a), torch_of(*inputs)) for a, (name, (_, torch_of)) in zip(ours, OPERATORS.items())
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_agrees_with_pytorch_where_there_are_nan(results, name):
    ours, expected = results[name]
    torch.testing.assert_close(ours.to(expected.dtype), expected, rtol=0, atol=0, equal_nan=True)


def test_integers_are_those_of_tvm():
    x = relax.Var("x", relax.TensorType((4, 5), "int32"))
    mod = module_of([x], lambda builder: builder.emit(op.max(builder.emit(op.nn.relu(x)), [1])))
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(mod)
        program = run_linked(tvm.compile(mod, target=QUICK_LLVM))["main"]
    given = torch.arange(-10, 10, dtype=torch.int32).reshape(4, 5)
    assert torch.from_dlpack(program(tvm.runtime.from_dlpack(given))).tolist() == given.relu().amax(1).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_no_maximum_or_minimum_of_floats_is_left_for_cuda(dtype):
    target, found = parse_target("cuda -arch=sm_80"), []
    with target:
        mod = tvm.transform.Sequential(cuda_passes(target))(module(dtype))
    for function in mod.functions.values():
        if isinstance(function, tirx.PrimFunc):
            tvm_ffi.structural_walk(function.body, ((tirx.Max, tirx.Min), found.append), order="post")
    assert found and not [node for node in found if "float" in str(node.ty.dtype)]
