"""What is compiled and why is told to the logger "stof_tvm"."""

import logging

import pytest
import torch

from stof_tvm.dynamo import told
from tests.models.quick_llvm import QUICK_LLVM


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x, power=1):
        return x * self.scale + power


@torch.no_grad()
def test_each_compilation_is_told_once(caplog):
    """Nothing is told at PyTorch's own level; at INFO a line before each compilation says why there is another."""
    model = Scaled().eval()
    compiled = torch.compile(model, backend="stof", dynamic=True, options={"target": QUICK_LLVM})
    with caplog.at_level(logging.INFO, "stof_tvm"):
        for length in (3, 3, 5, 3):
            assert torch.equal(compiled(torch.ones(length, 4)), torch.full((length, 4), 2.0))
        assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
        first, second = (record.getMessage() for record in caplog.records)
        assert first.startswith("torch.compile(backend='stof') compiles an engine, of a graph's first call: ")
        assert "x is (3, 4)" in first
        assert "because " in second and "x is (5, 4) and was (3, 4)" in second
        caplog.clear()
        model.scale.fill_(3.0)
        compiled(torch.ones(3, 4))
        assert [record.getMessage() for record in caplog.records][0].endswith("a buffer has changed")
    assert logging.getLogger("stof_tvm").getEffectiveLevel() > logging.INFO


def test_the_eighth_engine_of_a_graph_is_a_warning(caplog):
    names = ["input_ids", "s7"]
    for engines in range(told.MANY + 2):
        told.tell(names, ((1, engines + 2), (int, str(engines + 2))), ((1, engines + 1), (int, "1")), engines, False)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "the 8th engine of a graph" in record.getMessage()
    assert "because input_ids is (1, 9) and was (1, 8), s7 is 9 and was 1.  Pad inputs" in record.getMessage()


def test_long_lists_and_values_are_cut(caplog):
    key, known = tuple((n,) for n in range(9)), tuple((n + 1,) for n in range(9))
    with caplog.at_level(logging.INFO, "stof_tvm"):
        told.tell([f"x{n}" for n in range(9)], key, known, 1, False)
        told.tell(["x"], ((str, "a" * 900),), ((str, "b"),), 1, False)
    some, long = (record.getMessage() for record in caplog.records)
    assert "x2 is (2,) and was (3,) and 6 more" in some and "x3" not in some and len(long) < 200


def test_names_are_the_models():
    graph = torch.fx.symbolic_trace(lambda L_input_ids_, l_self_modules_x: L_input_ids_ + l_self_modules_x).graph
    assert told.names_of(graph.find_nodes(op="placeholder")) == ["input_ids", "self_modules_x"]
