"""What the frontend mends of an exported program."""

import re

import pytest
import torch

from stof_tvm.errors import InputError
from stof_tvm.frontend.direct import try_direct
from stof_tvm.frontend.export import _with_readers, export_model


class Pooled(torch.nn.Module):
    """A result that nobody reads, as of a pooler."""

    def __init__(self):
        super().__init__()
        self.pooler = torch.nn.Linear(8, 8)

    def forward(self, x):
        hidden = torch.relu(x)
        torch.tanh(self.pooler(hidden))
        return hidden + 1


class EveryConverter:
    def __contains__(self, name):
        return True


def operators(program) -> list[str]:
    return [node.target._opname for node in program.graph.nodes if node.op == "call_function"]


def test_a_reader_that_an_operand_does_not_know_is_found():
    program = export_model(Pooled(), (torch.zeros(2, 8),), {})
    linear = next(node for node in program.graph.nodes if "linear" in node.name)
    hidden = linear.args[0]
    del hidden.users[linear]
    assert _with_readers(program) is program
    assert linear in hidden.users
    assert all(node in operand.users for node in program.graph.nodes for operand in node.all_input_nodes)


def test_what_nobody_reads_is_removed():
    program = export_model(Pooled(), (torch.zeros(2, 8),), {})
    for node in program.graph.nodes:
        if "linear" in node.name:
            del node.args[0].users[node]
    assert "linear" in operators(program)
    assert try_direct(_with_readers(program), EveryConverter())
    assert operators(program) == ["relu", "add"]


class Inverted(torch.nn.Module):
    """Rows put back in their order, as experts do; `whole` writes into the new tensor itself, else into a view."""

    def __init__(self, whole: bool, new=torch.empty_like):
        super().__init__()
        self.whole, self.new = whole, new

    def forward(self, x, order):
        inverse = self.new(order)
        (inverse if self.whole else inverse[:])[order] = torch.arange(len(order))
        return x[inverse]


@pytest.mark.parametrize("new", [torch.empty_like, lambda order: order.new_empty(4)], ids=["like", "of a shape"])
def test_a_new_tensor_is_filled_without_a_second_trace(new):
    inputs = torch.randn(4, 2), torch.tensor([2, 0, 3, 1])
    program = export_model(Inverted(whole=True, new=new), inputs, {})
    assert try_direct(program, EveryConverter())
    assert "index_put" in operators(program) and "index_put_" not in operators(program)
    torch.testing.assert_close(program.module()(*inputs), inputs[0][[1, 3, 0, 2]])


def test_a_part_of_a_new_tensor_is_filled_by_the_second_trace():
    program = export_model(Inverted(whole=False), (torch.randn(4, 2), torch.tensor([2, 0, 3, 1])), {})
    assert not try_direct(program, EveryConverter())


@pytest.mark.parametrize(
    "args, kwargs, given",
    [((), {"y": torch.zeros(2, 8)}, "(y)"), ((torch.zeros(2, 8),) * 2, {}, "(2 by position)")],
)
def test_inputs_that_forward_does_not_take(args, kwargs, given):
    with pytest.raises(InputError, match=re.escape(f"the example inputs {given} do not fit Pooled.forward(x): ")):
        export_model(Pooled(), args, kwargs)
