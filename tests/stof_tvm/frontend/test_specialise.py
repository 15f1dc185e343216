"""Exported programs at one set of shapes."""

import pytest
import torch
from torch.export import Dim

import stof_tvm
from stof_tvm.errors import InputError, UnsupportedError
from stof_tvm.frontend.shape_range import range_of_program
from stof_tvm.frontend.specialise import specialised
from tests.models.quick_llvm import QUICK_LLVM


class Sizes(torch.nn.Module):
    """Sizes in a slice, a reshape, an arange, a factor, a split and a result."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(99, 4))

    def forward(self, x):
        batch, length, width = x.shape
        y = (x + self.table[:length]).reshape(batch * length, width) * length**0.5
        y = y + torch.arange(batch * length)[:, None]
        first, second = y.split([length, (batch - 1) * length])
        return first, second.view(-1, length, width), batch * length


def exported(model, x, **dims):
    return torch.export.export(model, (x,), dynamic_shapes=({int(dim[1:]): size for dim, size in dims.items()},))


def at(program, *shape):
    return specialised(program, range_of_program(program).numbers([torch.zeros(shape)]))


@torch.no_grad()
@pytest.mark.parametrize("shape", [(3, 3, 4), (5, 50, 4)])
def test_sizes_become_numbers(shape):
    program = exported(Sizes(), torch.zeros(3, 7, 4), d0=Dim("b", min=3, max=9), d1=Dim("n", min=2, max=50))
    fixed, x = at(program, *shape), torch.randn(shape)
    found, expected = fixed.module()(x), program.module()(x)
    assert (
        all(torch.equal(a, b) for a, b in zip(found[:2], expected)) and found[2] == expected[2] == shape[0] * shape[1]
    )
    values = [node.meta.get("val") for node in fixed.graph.nodes]
    assert not any(isinstance(x, torch.SymInt | torch.SymFloat) for x in values)
    assert all(type(n) is int for x in values if isinstance(x, torch.Tensor) for n in x.shape)
    assert fixed.state_dict["table"] is program.state_dict["table"]
    assert any(
        isinstance(n, torch.SymInt) for node in program.graph.nodes for n in getattr(node.meta["val"], "shape", ())
    )


def test_module_paths_and_names_stay():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x):
            return self.inner(x).view(x.shape[0] * 4)

    program = exported(Outer(), torch.zeros(3, 4), d0=Dim("n", min=2, max=50))
    fixed = at(program, 7, 4)
    (linear,) = [node for node in fixed.graph.nodes if "linear" in node.name]
    assert linear.name == "linear" and "inner" in str(linear.meta["nn_module_stack"])


def test_assertions_of_the_program():
    class Checked(torch.nn.Module):
        def forward(self, x, y):
            n = x.shape[0] + y.shape[0]
            torch._check(n % 4 == 0, lambda: "together a multiple of 4")
            return x.sum() + y.sum()

    dynamic = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC})
    program = torch.export.export(
        Checked(),
        (torch.zeros(3), torch.zeros(5)),
        dynamic_shapes=dynamic,
        prefer_deferred_runtime_asserts_over_guards=True,
    )
    shapes = range_of_program(program)
    fixed = specialised(program, shapes.numbers([torch.zeros(5), torch.zeros(7)]))
    assert not fixed.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_scalar.default)
    with pytest.raises(InputError, match="not exported for inputs|does not take inputs of these shapes"):
        specialised(program, shapes.numbers([torch.zeros(5), torch.zeros(8)]))


def test_sizes_that_depend_on_values_are_refused():
    class Positive(torch.nn.Module):
        def forward(self, x):
            return x.nonzero()

    program = exported(Positive(), torch.zeros(3), d0=Dim("n", min=2))
    with pytest.raises(UnsupportedError, match="depends on values"):
        at(program, 4)


@pytest.mark.parametrize("lazy", [False, True])
def test_inputs_that_are_called_as_functions_of_python_are(lazy):
    class Model(torch.nn.Module):
        def forward(self, input, type, sum=None):
            return input + type if sum is None else input + type * sum

    n = torch.export.Dim("n", min=2, max=8)
    inputs = {"input": torch.randn(3, 4), "type": torch.randn(3, 4), "sum": torch.randn(4)}
    shapes = {"input": {0: n}, "type": {0: n}, "sum": None}
    engine = stof_tvm.build(Model(), QUICK_LLVM, inputs, dynamic_shapes=shapes, lazy=lazy)
    inputs = {"input": torch.randn(5, 4), "type": torch.randn(5, 4), "sum": torch.randn(4)}
    torch.testing.assert_close(engine(**inputs), Model()(**inputs))
