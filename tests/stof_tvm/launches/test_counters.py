"""Counters of calls, captured ones and others, without a GPU: PyTorch's answer to what is captured is given."""

import contextlib

import pytest
import torch

from stof_tvm.launches import counters
from stof_tvm.launches.counters import Counters

GPU = torch.device("cuda", 0)


@pytest.fixture
def captured(monkeypatch):
    """A list; while it holds something, the stream is captured.  Tensors of a GPU are on the CPU."""
    found: list[bool] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: torch.Event())
    return found


def addresses(*tensors: torch.Tensor) -> set[int]:
    return {x.data_ptr() for x in tensors}


def test_captured_calls_have_memory_that_is_cleared_before_and_lives_on(captured):
    mine = Counters(64, GPU)
    ordinary = mine.take()
    assert not ordinary.int().any() and ordinary.shape == (64,) and ordinary.dtype == torch.uint32
    captured.append(True)
    taken = [mine.take() for _ in range(counters.READY)]
    assert len(addresses(*taken)) == counters.READY and not any(x.int().any() for x in taken)
    assert addresses(*taken) == addresses(*mine._cleared) and not addresses(ordinary) & addresses(*taken)
    more = [mine.take() for _ in range(3)]
    assert not addresses(*more) & addresses(*mine._cleared), "the graph clears them itself"
    assert not any(x.int().any() for x in more)


def test_later_calls_do_not_synchronize(captured, monkeypatch):
    """Not even where all that were ready are used up: another thread may be capturing."""
    mine = Counters(1, GPU)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("synchronized"))
    for _ in range(2):
        captured.append(True)
        assert len(addresses(*[mine.take() for _ in range(counters.READY)])) == counters.READY
        captured.clear()
        mine.take()
    assert mine.nbytes == 4 * counters.READY and not mine._ready


@pytest.mark.parametrize("size, ready", [(0, 0), (1, 128), (512, 128), (1024, 64), (counters.READY_BYTES, 0)])
def test_as_many_are_ready_as_a_limit_of_bytes_allows(size, ready, captured):
    mine = Counters(size, GPU)
    assert len(mine._ready) == ready and mine.nbytes == 4 * size * ready <= counters.READY_BYTES
    captured.append(True)
    assert mine.take().shape == (size,)


def test_on_a_cpu_each_call_clears_its_own(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: 1 / 0)
    mine = Counters(4, torch.device("cpu"))
    first, second = mine.take(), mine.take()
    first.fill_(1)
    assert not second.int().any() and mine.nbytes == 0
