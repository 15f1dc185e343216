"""Chains whose schedules or types TVM refuses on LLVM: they compile, and give PyTorch's numbers."""

import functools

import pytest
import torch
import torch.nn.functional as F
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx

import stof_tvm
from relax_passes.schedule.cpu_rules.plain import PLAIN, keep_plain, without_refused_schedules

BF16 = torch.bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, BF16: 2e-2}


class Function(torch.nn.Module):
    """A function as a model."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *tensors):
        return self.function(*tensors)


def reverse_every_second_row(x):
    gate, up = x.unflatten(-1, (2, -1)).unbind(-2)
    y = (F.silu(gate) * up).clamp(-7, 7)
    y[:, ::2] = y[:, ::2].flip(-1)
    return y


CASES = {
    "rounding after gelu": (lambda x: F.gelu(x).to(BF16).float(), torch.float32, (3, 12, 2)),
    "rounding alone": (lambda x: (x + 1).to(BF16).float(), torch.float32, (3, 12, 2)),
    "rounded weights": (lambda x, y: torch.softmax(x, -1).to(BF16).float() @ y, torch.float32, (2, 5, 8), (2, 8, 4)),
    "rounding before a quotient": (lambda x: ((x * 5).to(BF16) // 2).float(), torch.float32, (2, 5, 8)),
    "bf16 write of a view": (reverse_every_second_row, BF16, (5, 64)),
    "bf16 maximum": (lambda x: torch.maximum(torch.sigmoid(x), x), BF16, (2, 4, 8)),
    "bf16 between products": (lambda x, w: torch.rsqrt((x @ w).abs() + 1) @ w, BF16, (2, 4, 8), (8, 8)),
    "bf16 scale 0": (lambda x: F.scaled_dot_product_attention(x, x, x, scale=0), BF16, (1, 2, 4, 8)),
    "gate of one column": (lambda x, v, w: F.silu(x @ v) * (x @ w), torch.float32, (2, 3, 8), (8, 1), (8, 8)),
    "chain that repeats its values": (
        lambda x, y: functools.reduce(torch.maximum, [y - k for k in range(8)], torch.sigmoid(x)),
        torch.float32,
        (2, 4, 8),
        (2, 4, 8),
    ),
    "sinh": (torch.sinh, torch.float32, (3, 8)),
    "topk": (lambda x: x.topk(3, -1).values, torch.float32, (2, 3, 8)),
    "sort": (lambda x: x.sort(-1).values, torch.float32, (2, 3, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_chain_gives_pytorch_s_numbers(name):
    function, dtype, *shapes = CASES[name]
    torch.manual_seed(0)
    tensors = tuple(torch.randn(shape).to(dtype) for shape in shapes)
    expected = function(*(t.clone() for t in tensors))
    result = stof_tvm.build(Function(function), "llvm", tensors, verify=False)(*tensors)
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


def test_function_that_does_not_build_gets_its_plain_loops_back():
    def functions():
        """A copy in vectors and in plain loops."""
        x = te.placeholder((16,), "float32")
        plain = te.create_prim_func([x, te.compute((16,), lambda i: x[i], name="y")])
        sch = s_tir.Schedule(plain)
        sch.vectorize(sch.get_loops(sch.get_sblock("y"))[0])
        return sch.mod["main"].without_attr("global_symbol"), plain.without_attr("global_symbol")

    def build(mod, _target):
        if mod["main"].attrs["mark"] == "refused":
            raise ValueError

    vectors, plain = functions()
    for mark, expected in (("refused", plain), ("accepted", vectors)):
        mod = tvm.IRModule({"main": keep_plain(vectors, plain).with_attr("mark", mark)})
        result = without_refused_schedules(mod, None, build)["main"]
        assert isinstance(result, tirx.PrimFunc) and result.attrs["mark"] == mark
        assert tvm_ffi.structural_equal(result.body, expected.body, map_free_vars=True)
        assert (PLAIN in result.attrs) == (mark == "accepted")
