"""Numbers among a graph's results: they change from call to call without another engine."""

import pytest
import torch

from stof_tvm.dynamo import graph
from tests.models.quick_llvm import QUICK_LLVM


class Counts:
    """What a caller keeps beside tensors."""

    def __init__(self):
        self.calls = 3
        self.share = 0.5


@pytest.fixture
def built(monkeypatch):
    torch._dynamo.reset()
    engines, actual = [], graph.build
    monkeypatch.setattr(graph, "build", lambda *a, **k: engines.append(actual(*a, **k)) or engines[-1])
    yield engines
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, backend="stof", options={"target": QUICK_LLVM}, dynamic=True)


@torch.no_grad()
def test_a_count_beside_tensors(built):
    counts = Counts()

    @compiled
    def step(x):
        counts.calls += x.shape[0]
        return x * 2, counts.calls * 2 + 1

    for n in range(1, 6):
        y, number = step(torch.ones(2, 3))
        assert torch.equal(y, torch.full((2, 3), 2.0)) and counts.calls == 3 + 2 * n
        assert number == counts.calls * 2 + 1
    assert len(built) <= 2  # one where TorchDynamo took the count for a constant


@torch.no_grad()
def test_a_count_that_a_tensor_depends_on(built):
    counts = Counts()

    @compiled
    def step(x):
        counts.calls += 1
        return x * counts.calls

    for n in range(4, 7):
        assert torch.equal(step(torch.ones(2, 3)), torch.full((2, 3), float(n)))


@torch.no_grad()
def test_an_unread_tensor_may_change_its_shape(built):
    counts = Counts()

    @compiled
    def step(x, other):
        counts.calls += other.shape[0]
        return x + 1, counts.calls

    assert step(torch.ones(2), torch.ones(3, 4))[1] == 6
    assert step(torch.ones(2), torch.ones(5, 4))[1] == 11
    assert step(torch.ones(2), torch.ones(7, 4))[1] == 18
