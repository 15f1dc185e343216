"""Counters of calls, captured ones and others, without a GPU: PyTorch's answer to what is captured is given."""

import pytest
import torch

from stof_tvm.launches import counters
from stof_tvm.launches.counters import Counters


@pytest.fixture
def captured(monkeypatch):
    """A list; while it holds something, the stream is captured."""
    found: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Event())
    return found


def on_a_gpu(size: int) -> Counters:
    """Counters as those of a GPU, on the CPU."""
    found = Counters(size, torch.device("cuda", 0))
    found.device = torch.device("cpu")
    return found


def addresses(*tensors: torch.Tensor) -> set[int]:
    return {x.data_ptr() for x in tensors}


def test_captured_calls_have_memory_that_is_cleared_before_and_lives_on(captured):
    mine = on_a_gpu(64)
    ordinary = mine.take()
    assert not ordinary.int().any() and ordinary.shape == (64,) and ordinary.dtype == torch.uint32
    captured.append(True)
    taken = [mine.take() for _ in range(counters.READY)]
    assert len(addresses(*taken)) == counters.READY and not any(x.int().any() for x in taken)
    (cleared,) = mine._cleared
    assert addresses(*taken) == addresses(*cleared), "no other memory"
    more = [mine.take() for _ in range(3)]
    assert not addresses(*more) & addresses(*cleared), "the graph clears them itself"
    assert not any(x.int().any() for x in more)


def test_used_ones_are_made_up_for_by_ordinary_calls(captured):
    mine = on_a_gpu(1)
    mine.take()
    for _ in range(3):
        captured.append(True)
        taken = [mine.take() for _ in range(counters.READY)]
        captured.clear()
        assert addresses(*taken) <= addresses(*(row for block in mine._cleared for row in block))
        mine.take()
    assert len(mine._cleared) == 4 and sum(map(len, mine._cleared)) == 4 * counters.READY


@pytest.mark.parametrize("size, ready", [(0, 0), (1, 128), (512, 128), (1024, 64), (counters.READY_BYTES, 0)])
def test_as_many_are_ready_as_a_limit_of_bytes_allows(size, ready, captured):
    mine = on_a_gpu(size)
    mine.take()
    assert len(mine._ready) == ready and mine.nbytes == 4 * size * ready <= counters.READY_BYTES
    captured.append(True)
    assert mine.take().shape == (size,)


def test_on_a_cpu_each_call_clears_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)
    mine = Counters(4, torch.device("cpu"))
    first, second = mine.take(), mine.take()
    first.fill_(1)
    assert not second.int().any() and mine.nbytes == 0
