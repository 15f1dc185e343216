"""A model has after its export what it had before: attributes, buffers, lists, dicts and objects in them."""

import collections
import types

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor

from stof_tvm.errors import ExportError
from stof_tvm.frontend.export import export_model


class Slotted:
    __slots__ = ("empty", "table")

    def __init__(self):
        self.table = None


class Holder:
    """No module, and has what modules have."""

    def __init__(self):
        self.table = None
        self.tables = {"before": torch.zeros(8)}


class Keeps(nn.Module):
    """Computes a table where it has none, and keeps it, by `keep(model, table)`; `kept(model)` is what it has."""

    def __init__(self, keep, kept, **own):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.keep, self.kept = keep, kept
        for name, value in own.items():
            setattr(self, name, value)

    def forward(self, x):
        table = self.kept(self)
        if table is None:
            table = torch.arange(8) * 2.0
        self.keep(self, table + 0)
        return self.linear(x) + table


def in_a_new_buffer(model, table):
    model.table = table


KEEPS = {
    "an attribute": lambda: Keeps(lambda m, x: setattr(m, "table", x), lambda m: getattr(m, "table", None)),
    "an attribute of a part": lambda: Keeps(
        lambda m, x: setattr(m.linear, "table", x), lambda m: getattr(m.linear, "table", None)
    ),
    "a dict": lambda: Keeps(lambda m, x: m.own.update(table=x), lambda m: m.own.get("table"), own={}),
    "a dict in a list": lambda: Keeps(
        lambda m, x: m.own[0].update(table=x), lambda m: m.own[0].get("table"), own=[collections.OrderedDict(b=2)]
    ),
    "a list": lambda: Keeps(lambda m, x: m.own.append(x), lambda m: m.own[-1] if m.own else None, own=[]),
    "a deque": lambda: Keeps(
        lambda m, x: m.own.append(x), lambda m: m.own[-1] if m.own else None, own=collections.deque(maxlen=2)
    ),
    "a set": lambda: Keeps(lambda m, x: m.own.add(x), lambda m: next(iter(m.own), None), own=set()),
    "an object": lambda: Keeps(lambda m, x: setattr(m.own, "table", x), lambda m: m.own.table, own=Holder()),
    "an object's dict": lambda: Keeps(
        lambda m, x: m.own.tables.update(table=x), lambda m: m.own.tables.get("table"), own=Holder()
    ),
    "an object in a tuple": lambda: Keeps(
        lambda m, x: setattr(m.own[1], "table", x), lambda m: None, own=(1, Holder())
    ),
    "slots": lambda: Keeps(lambda m, x: setattr(m.own, "table", x), lambda m: m.own.table, own=Slotted()),
    "an empty slot": lambda: Keeps(
        lambda m, x: setattr(m.own, "empty", x), lambda m: getattr(m.own, "empty", None), own=Slotted()
    ),
    "what a method is of": lambda: Keeps(
        lambda m, x: setattr(m.own.__self__, "table", x),
        lambda m: m.own.__self__.table,
        own=types.MethodType(lambda self: None, Holder()),
    ),
    "a namespace": lambda: Keeps(
        lambda m, x: setattr(m.own, "table", x), lambda m: m.own.table, own=types.SimpleNamespace(table=None)
    ),
}


def with_an_empty_buffer() -> nn.Module:
    model = Keeps(in_a_new_buffer, lambda m: m.table)
    model.register_buffer("table", None, persistent=False)
    return model


@pytest.mark.parametrize("name", [*KEEPS, "a buffer without a value"])
@pytest.mark.parametrize("fails", [False, True])
def test_tables_that_a_model_keeps(name, fails):
    model = KEEPS[name]() if name in KEEPS else with_an_empty_buffer()
    own, x = getattr(model, "own", None), torch.randn(3, 8)
    before = model.kept(model)
    expected = model.linear(x) + torch.arange(8) * 2.0
    if fails:
        last = model.register_forward_hook(lambda *_: next(iter(())))
        with pytest.raises(ExportError, match="StopIteration"):
            export_model(model, (x,), {})
        last.remove()
    else:
        for _ in range(2):
            program = export_model(model, (x,), {})
            torch.testing.assert_close(program.module()(x), expected)
    assert model.kept(model) is before and getattr(model, "own", None) is own
    assert set(model._buffers) == ({"table"} if name not in KEEPS else set())
    for _ in range(2):
        result = model(x)
        assert not isinstance(result, FakeTensor)
        torch.testing.assert_close(result, expected)


def test_a_table_that_was_there():
    """And lists that parts share are shared afterwards, which torch.export copies."""
    table, shared = torch.arange(8) * 2.0, [torch.zeros(8)]
    model = KEEPS["an attribute"]()
    model.table, model.own, model.linear.own = table, shared, shared
    export_model(model, (torch.randn(3, 8),), {})
    assert model.table is table and model.own is shared and model.linear.own is shared


def test_numbers_of_a_call():
    class Counts(nn.Module):
        calls, length = 0, 0

        def forward(self, x):
            self.calls, self.length = self.calls + 1, x.shape[0]
            return x + 1

    model = Counts()
    export_model(model, (torch.randn(3, 8),), {}, None, {"x": {0: torch.export.Dim("n", max=9)}})
    assert (model.calls, model.length) == (0, 0)
    assert "calls" not in vars(model) and "length" not in vars(model)


def test_buffers_that_are_replaced():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(8), persistent=False)

        def forward(self, x):
            self.register_buffer("table", torch.arange(8) * 2.0, persistent=False)
            return x + self.table

    model, x = Replaces(), torch.randn(3, 8)
    before = model.table
    program = export_model(model, (x,), {})
    assert model.table is before and torch.equal(before, torch.zeros(8))
    torch.testing.assert_close(program.module()(x), x + torch.arange(8) * 2.0)


def test_a_buffer_that_a_call_registers_is_refused():
    """PyTorch would export the update of an input."""

    class Registers(nn.Module):
        def forward(self, x):
            if not hasattr(self, "table"):
                self.register_buffer("table", torch.arange(8) * 2.0, persistent=False)
            return x + self.table

    model, x = Registers(), torch.randn(3, 8)
    with pytest.raises(ExportError, match="registers its buffer 'table' when it is called"):
        export_model(model, (x,), {})
    assert not model._buffers
    expected = model(x)
    torch.testing.assert_close(export_model(model, (x,), {}).module()(x), expected)
