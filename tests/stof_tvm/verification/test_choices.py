"""Integers that follow from an order of numbers, and those that are computed."""

import pytest
import torch
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

import stof_tvm
from stof_tvm.errors import VerificationError
from stof_tvm.frontend import import_model
from stof_tvm.verification.reference import Reference
from tests.models.quick_llvm import QUICK_LLVM

CHOSEN = {
    "argmax": lambda y, ids: y.argmax(-1),
    "what is computed with it": lambda y, ids: y.argmax(-1) * 2 + ids,
    "indices of topk": lambda y, ids: y.topk(2).indices,
    "indices of a maximum": lambda y, ids: y.max(-1)[1],
    "a lookup by a rounded number": lambda y, ids: torch.arange(100)[y.long().abs()],
    "a count after a choice": lambda y, ids: (y.gather(1, y.argmax(-1, True)) > 0).sum(),
}
COMPUTED = {
    "a count": lambda y, ids: (y > 0).sum(),
    "a comparison": lambda y, ids: y > 0,
    "a rounded number": lambda y, ids: y.round().long(),
    "values of topk": lambda y, ids: y.topk(2).values.long(),
    "a maximum": lambda y, ids: y.max(-1).values.int(),
    "lengths": lambda y, ids: (ids > 3).sum(-1),
    "a lookup by an input": lambda y, ids: torch.arange(100)[ids],
    "a bucket": lambda y, ids: torch.bucketize(y, torch.arange(3.0)),
}


class Model(torch.nn.Module):
    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.compute = torch.nn.Linear(8, 8), compute

    def forward(self, x, ids):
        return self.compute(self.linear(x), ids)


@pytest.mark.parametrize("name", [*CHOSEN, *COMPUTED])
def test_a_choice_is_told_from_a_computation(name):
    model = Model((CHOSEN | COMPUTED)[name]).eval()
    imported = import_model(model, (torch.randn(4, 8), torch.arange(4)), {})
    assert Reference(imported).follows_from_a_choice(0) == (name in CHOSEN)


@tvm.transform.module_pass(opt_level=0, name="OffBy")
class OffBy:
    """A rule that is wrong: it adds to every sum."""

    def __init__(self, more: int):
        self.more = more

    def transform_module(self, mod, _ctx):
        more = self.more

        @mutator
        class Wrong(PyExprMutator):
            def visit_call_(self, call):
                call = super().visit_call_(call)
                if not isinstance(call.op, tvm.ir.Op) or call.op.name != "relax.sum":
                    return call
                return relax.op.add(self.builder_.emit(call), relax.const(more, "int64"))

        wrong = Wrong(mod)
        for name, function in mod.functions_items():
            if isinstance(function, relax.Function):
                wrong.builder_.update_func(name, wrong.visit_expr(function))
        return wrong.builder_.get()


def test_a_count_may_be_off_by_what_roundings_turn_only():
    """A few of many numbers are so near to the threshold that a rounding moves them across it."""
    model = Model(lambda y, ids: (y[:, 0] > y[0, 0]).sum()).eval()
    x = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    x[1:9] = x[0] * (1 + 1e-7 * torch.arange(-4.0, 4.0)[:, None])
    ids = torch.zeros(1, dtype=torch.int64)
    build = lambda more: stof_tvm.build(model, QUICK_LLVM, (x, ids), rules=[OffBy(more)])
    assert build(0)(x, ids) - model(x, ids) in range(-8, 9)
    with pytest.raises(VerificationError, match="1 of 1 elements are others"):
        build(100)
