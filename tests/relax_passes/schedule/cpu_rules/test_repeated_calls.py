"""A call that inlining wrote many times is made once, and what a branch guards stays in its branch."""

import pytest
import torch
import tvm
from torch import nn
from tvm import s_tir, te, tirx

import stof_tvm
from relax_passes.schedule.cpu_rules.repeated_calls import bind_repeated_calls
from relax_passes.schedule.cpu_rules.vector_math import expand_math


def function_of(compute, dtype="float32"):
    """y[i] = compute(x, i), of 64 elements, without a schedule."""
    x = te.placeholder((64,), dtype, name="x")
    y = te.compute((64,), lambda i: compute(x, i), name="y")
    return s_tir.Schedule(te.create_prim_func([x, y])).mod["main"]


def guarded(x, i):
    twice = lambda at: tirx.exp(x[at]) * (tirx.exp(x[at]) + 1.0)
    return tirx.if_then_else(i > 0, twice(i - 1), twice(i))


# program -> (exponentials that are written, exponentials that are left)
PROGRAMS = {
    "one": (lambda x, i: tirx.exp(x[i]), 1, 1),
    "the same one": (lambda x, i: tirx.exp(x[i]) * (tirx.exp(x[i]) - 1.0), 2, 1),
    "others": (lambda x, i: tirx.exp(x[i]) * tirx.exp(-x[i]), 2, 2),
    "one of another, in turn": (lambda x, i: tirx.exp(tirx.exp(x[i])) + tirx.exp(tirx.exp(x[i])), 4, 2),
    "in branches": (guarded, 4, 2),
    "of a branch": (lambda x, i: (lambda y: tirx.exp(y) / tirx.exp(y))(tirx.if_then_else(i > 0, x[i - 1], x[i])), 2, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_left_once(name):
    compute, before, after = PROGRAMS[name]
    function = function_of(compute)
    assert function.script().count("T.exp(") == before
    bound = bind_repeated_calls(function)
    assert bound.script().count("T.exp(") == after
    results = []
    x = torch.randn(64)
    for each in (function, bound):
        results.append(torch.empty(64))
        tvm.compile(tvm.IRModule({"main": expand_math(each)}), target="llvm")["main"](x, results[-1])
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_binds_or_reads_bfloat16_stays(dtype):
    wide = lambda x, i: x[i].astype("float32")
    let = lambda value: (lambda v: tirx.Let(v, value, tirx.exp(v) + tirx.exp(v)))(tirx.Var("v", "float32"))
    compute = {"bfloat16": lambda x, i: tirx.exp(wide(x, i)) + tirx.exp(wide(x, i)), "float32": lambda x, i: let(x[i])}
    function = function_of(compute[dtype], dtype)
    assert bind_repeated_calls(function).same_as(function)


def test_a_remainder_of_sinh_compiles_at_once():
    """Inlined, sinh was there 24 times, in two branches: two minutes."""

    class Model(nn.Module):
        def forward(self, x):
            y, z = x.sinh().remainder(0.7), torch.empty_like(x)
            z[..., 0::2] = y[..., 0::2] * 2 - y[..., 1::2]
            z[..., 1::2] = y[..., 0::2] + y[..., 1::2] * 2
            return z

    x = torch.randn(2, 14, 16)
    torch.testing.assert_close(stof_tvm.build(Model(), "llvm", (x,))(x), Model()(x))
