"""Norms and variances: as exact as PyTorch's on rows that cancel, vanish or are huge, in every dtype."""

import pytest
import torch
import torch.nn.functional as F
import tvm
from tvm import relax

from relax_passes.schedule.cpu import cpu_passes
from tests.models.quick_llvm import QUICK_LLVM, run_linked
from tests.relax_passes.fusion.modules import module_of

op = relax.op
N = 33
SHAPE = (2, 6, 3, 11)

NORMS = {
    "layer_norm": lambda x, w, b: op.nn.layer_norm(x, w, b, [-1], 1e-5),
    "rms_norm": lambda x, w, b: op.nn.rms_norm(x, w, [-1], 1e-6),
}
REFERENCES = {
    "layer_norm": lambda x, w, b: F.layer_norm(x, (N,), w, b, 1e-5),
    "rms_norm": lambda x, w, b: F.rms_norm(x, (N,), w, 1e-6),
}
ROWS = {
    "normal": lambda x: x,
    "equal numbers": lambda x: torch.full_like(x, 3.7),
    "a large mean": lambda x: x + 1e4,
    "tiny": lambda x: x * 1e-20,
    "huge": lambda x: x * 1e18,
    "the largest of half precision": lambda x: x.sign() * 65504,
    "zeros": torch.zeros_like,
}


def compiled(params, body):
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(module_of(params, body))
        program = run_linked(tvm.compile(mod, target=QUICK_LLVM))["main"]

    def call(*tensors):
        results = program(*(tvm.runtime.from_dlpack(x) for x in tensors))
        return [torch.from_dlpack(x) for x in results]

    return call


def variables(dtype, *shapes):
    return [relax.Var(f"x{i}", relax.TensorType(shape, dtype)) for i, shape in enumerate(shapes)]


@pytest.fixture(scope="module", params=["float32", "float16"])
def norms(request):
    """The dtype, and both norms of (4, N) as one program."""
    params = variables(request.param, (4, N), (N,), (N,))
    body = lambda builder: relax.Tuple([builder.emit(norm(*params)) for norm in NORMS.values()])
    return getattr(torch, request.param), compiled(params, body)


@pytest.mark.parametrize("rows", ROWS)
def test_no_less_exact_than_twice_pytorch(norms, rows):
    dtype, program = norms
    generator = torch.Generator().manual_seed(1)
    x, w, b = (torch.randn(*shape, generator=generator) for shape in ((4, N), (N,), (N,)))
    inputs = [value.to(dtype) for value in (ROWS[rows](x), w, b)]
    for ours, reference in zip(program(*inputs), REFERENCES.values(), strict=True):
        exact, of_torch = reference(*(value.double() for value in inputs)), reference(*inputs)
        torch.testing.assert_close(ours.isnan(), of_torch.isnan(), rtol=0, atol=0)
        known = of_torch.isfinite() & exact.isfinite()
        error, error_of_torch = ((result.double() - exact)[known].abs().sum() for result in (ours, of_torch))
        unit = torch.finfo(dtype).eps * exact[known].abs().sum()
        assert error <= 2 * error_of_torch + unit


def test_layer_norm_over_several_dimensions_and_group_norm():
    params = variables("float32", SHAPE, SHAPE[2:], SHAPE[1:2])
    x, w, c = params

    def body(builder):
        layer = builder.emit(op.nn.layer_norm(x, w, w, [-2, -1], 1e-5))
        return relax.Tuple([layer, builder.emit(op.nn.group_norm(x, c, c, 3, 1, [2, 3], 1e-5))])

    generator = torch.Generator().manual_seed(2)
    inputs = [torch.randn(*[int(n) for n in p.ty.shape], generator=generator) for p in params]
    inputs[0] += 1000
    layer, group = compiled(params, body)(*inputs)
    given, matrix, channels = (value.double() for value in inputs)
    torch.testing.assert_close(layer.double(), F.layer_norm(given, SHAPE[2:], matrix, matrix), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(group.double(), F.group_norm(given, 3, channels, channels), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes, keepdims", [([-1], False), ([0, 2], True), (None, False)])
def test_variance_about_a_large_mean(axes, keepdims):
    (x,) = variables("float32", SHAPE)
    given = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) * 1e-3 + 1000
    (got,) = compiled([x], lambda builder: relax.Tuple([builder.emit(op.variance(x, axes, keepdims))]))(given)
    exact = given.double().var(axes, correction=0, keepdim=keepdims)
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=0)
