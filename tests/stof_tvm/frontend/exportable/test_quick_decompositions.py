"""Decompositions without their slow start are PyTorch's own."""

import contextlib

import pytest
import torch
from torch._C import DispatchKey
from torch._export import utils
from torch._ops import OperatorBase

from stof_tvm.frontend import export
from stof_tvm.frontend.exportable.quick_decompositions import quick_decompositions

X = torch.randn(2, 6, 8)
FUNCTIONS = {
    "attention": lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x) @ x.mT,
    "updates of views": lambda x: x.clone()[:, 1:].mul_(2).index_copy_(1, torch.tensor([0]), x[:, :1]),
    "composites": lambda x: torch.nn.functional.group_norm(x, 2).hsplit(2)[0].diff().kron(torch.ones(1, 2)),
    "a window": lambda x: torch.nn.functional.pad(x, (1, 1)).unfold(-1, 3, 1).flatten(1).softmax(-1).to(torch.float16),
}


class Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.forward = function


def exported(function):
    return torch.export.export(Module(function), (X,), strict=False)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_programs_are_the_same(name, monkeypatch):
    program = exported(FUNCTIONS[name])
    quick = export.decompose(program)
    monkeypatch.setattr(export, "quick_decompositions", contextlib.nullcontext)
    slow = export.decompose(program)
    assert str(quick.graph) == str(slow.graph) and quick.graph_signature == slow.graph_signature
    assert str(quick.graph) != str(program.graph)
    torch.testing.assert_close(quick.module()(X), slow.module()(X), rtol=0, atol=0)


def test_operators_are_looked_up_once(monkeypatch):
    calls, look_up = [], utils._materialize_cpp_cia_ops
    monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", lambda: calls.append(1) or look_up())
    export.decompose(exported(FUNCTIONS["composites"]))
    assert len(calls) == 1
    monkeypatch.setattr(export, "quick_decompositions", contextlib.nullcontext)
    export.decompose(exported(FUNCTIONS["composites"]))
    assert len(calls) > 20


def test_an_operator_that_is_registered_between_two_programs_is_decomposed():
    export.decompose(exported(FUNCTIONS["attention"]))
    with torch.library._scoped_library("stof_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        program = export.decompose(exported(lambda x: torch.ops.stof_test.twice(x)))
        targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert targets == ["aten.add.Tensor"]


def test_pytorchs_functions_come_back_after_an_error():
    before = utils._materialize_cpp_cia_ops, OperatorBase.py_impl
    with pytest.raises(ZeroDivisionError), quick_decompositions():
        assert (utils._materialize_cpp_cia_ops, OperatorBase.py_impl) != before
        raise ZeroDivisionError
    assert (utils._materialize_cpp_cia_ops, OperatorBase.py_impl) == before


def test_a_kernel_is_registered_once_and_never_for_python():
    operator = torch.ops.aten.hypot.default
    with quick_decompositions():
        try:
            assert operator.py_impl(DispatchKey.HPU)(max) is max and operator.py_kernels[DispatchKey.HPU] is max
            with pytest.raises(RuntimeError, match="override"):
                operator.py_impl(DispatchKey.HPU)(min)
            with pytest.raises(AssertionError, match="mode"):
                operator.py_impl(DispatchKey.Python)(min)
        finally:
            operator.py_kernels.pop(DispatchKey.HPU, None)


def test_pytorch_without_these_names_decomposes_as_it_does(monkeypatch):
    monkeypatch.delattr(utils, "_materialize_cpp_cia_ops")
    py_impl = OperatorBase.py_impl
    with quick_decompositions():
        assert OperatorBase.py_impl is py_impl
