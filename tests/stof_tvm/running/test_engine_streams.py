"""How the calls of an engine follow one another on a GPU, as far as a machine without one can tell."""

from types import SimpleNamespace

import pytest
import torch

from stof_tvm.engine import Engine
from stof_tvm.report import Report


class Stream:
    def __init__(self):
        self.log = []

    def wait_event(self, event):
        self.log.append(("wait", event))

    def record_event(self):
        self.log.append(("record", len(self.log)))
        return self.log[-1]


@pytest.fixture
def gpu(monkeypatch):
    """A CUDA engine that computes nothing, and the streams that it would see."""
    state = SimpleNamespace(stream=Stream(), capturing=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    state.engine = Engine(None, None, None, Report('{"kind": "cuda"}', (), (), ""), [], [])
    return state


def call(engine):
    with engine._after_the_last_call(engine._store):
        pass


def test_a_call_waits_for_the_one_before_on_another_stream(gpu):
    first, second = gpu.stream, Stream()
    call(gpu.engine)
    gpu.stream = second
    call(gpu.engine)
    assert second.log[0] == ("wait", first.log[-1])


def test_a_captured_call_touches_no_event_of_others(gpu):
    call(gpu.engine)
    ordinary, gpu.stream, gpu.capturing = gpu.stream, Stream(), True
    call(gpu.engine)
    assert gpu.stream.log == []
    gpu.stream, gpu.capturing = Stream(), False
    call(gpu.engine)
    assert gpu.stream.log[0] == ("wait", ordinary.log[-1])
