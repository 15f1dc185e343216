"""A graph that no engine can be built for runs in eager PyTorch with one warning; fullgraph=True makes it an error."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from stof_tvm import masks
from stof_tvm.dynamo import graph
from stof_tvm.errors import (
    CompileError,
    ExportError,
    InputError,
    NotRewrittenError,
    TargetError,
    UnsupportedError,
    VerificationError,
)
from tests.models.quick_llvm import QUICK_LLVM

EAGER = "runs a graph in eager PyTorch, for which no engine can be built .*: "


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model, options=None, **kwargs):
    return torch.compile(model, backend="stof", options={"target": QUICK_LLVM, **(options or {})}, **kwargs)


def pooled(x, scale=1.0):
    return torch.nn.functional.adaptive_max_pool1d(x, 4) * scale


@torch.no_grad()
def test_an_operator_without_a_converter():
    x = torch.randn(1, 2, 32)
    function = compiled(pooled)
    with pytest.warns(UserWarning, match=EAGER + "UnsupportedError: the model uses operators that have no converter"):
        torch.testing.assert_close(function(x), pooled(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(function(x + 1), pooled(x + 1))
        assert function(torch.randn(1, 2, 32)).shape == (1, 2, 4)
    with pytest.raises(UnsupportedError, match="no converter"):
        compiled(pooled, fullgraph=True)(x)
    with pytest.raises(UnsupportedError, match="no converter"):
        compiled(lambda x: sdpa(x, x, x) + pooled(x).sum(), {"mask": masks.sliding_window(2)})(x)


@torch.no_grad()
def test_numbers_that_change_reach_the_eager_graph():
    function, x = compiled(pooled), torch.randn(1, 2, 32)
    with pytest.warns(UserWarning, match=EAGER):
        for scale in (0.5, 0.7, 2, 0.9):
            torch.testing.assert_close(function(x, scale), pooled(x, scale))


@torch.no_grad()
def test_other_graphs_of_the_model_have_engines(monkeypatch):
    built, real = [], graph.build
    monkeypatch.setattr(graph, "build", lambda *args, **kwargs: built.append(real(*args, **kwargs)) or built[-1])

    @compiled
    def function(x):
        x = torch.relu(x) * 2
        torch._dynamo.graph_break()
        return pooled(x)

    x = torch.randn(1, 2, 32)
    with pytest.warns(UserWarning, match=EAGER) as told:
        torch.testing.assert_close(function(x), pooled(torch.relu(x) * 2))
    assert len(built) == 1 and len([each for each in told if "eager PyTorch" in str(each.message)]) == 1


def test_training_mode_and_updates_of_buffers():
    """Active dropout is refused; a batch norm beside it updates its statistics, once."""
    torch.manual_seed(0)
    model, twin = nn.Sequential(nn.BatchNorm1d(16), nn.Dropout()), nn.BatchNorm1d(16)
    x = torch.randn(4, 16)
    with torch.no_grad(), pytest.warns(UserWarning, match=EAGER + "UnsupportedError"):
        dropped = compiled(model)(x)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * twin(x)[kept])
    torch.testing.assert_close(model[0].running_mean, twin.running_mean)


@pytest.mark.parametrize("error", [UnsupportedError, ExportError, CompileError])
@torch.no_grad()
def test_what_is_the_graphs_fault_is_told(error, monkeypatch):
    def fail(*_, **__):
        raise error("no\nengine " + 1000 * "x")

    monkeypatch.setattr(graph, "build", fail)
    with pytest.warns(UserWarning, match=EAGER + f"{error.__name__}: no; engine x+…$"):
        assert compiled(torch.relu)(torch.ones(2)).sum() == 2


@pytest.mark.parametrize("error", [InputError, TargetError, VerificationError, NotRewrittenError])
@torch.no_grad()
def test_what_is_the_users_or_wrong_stays_an_error(error, monkeypatch):
    def fail(*_, **__):
        raise error("no")

    monkeypatch.setattr(graph, "build", fail)
    with pytest.raises(error, match="no"):
        compiled(torch.relu)(torch.ones(2))
