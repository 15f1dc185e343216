"""A range of lengths under traffic: threads with other lengths at once, memory over many calls of random lengths."""

import gc
import random
import threading
import time

import pytest
import torch
from torch.export import Dim

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.conftest import WIDTH, Attention, count
from tests.robustness.test_sharing import resident

LEAST, MOST = 8, 23  # a length of 16 is a whole vector, others are ragged
CALLS, WARM_UP, WINDOWS = count(1500, 10_000), count(300, 1000), 3
GROWTH = 512 << 10  # bytes in a window: a result of each call that is kept would be several times as many
ROUNDS = count(40, 1000)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Attention().eval()


@pytest.fixture(scope="module")
def engine(model):
    shapes = {"x": {1: Dim("length", min=LEAST, max=MOST)}}
    example = (torch.zeros(1, LEAST, WIDTH),)
    return stof_tvm.build(model, QUICK_LLVM, example, dynamic_shapes=shapes, lazy=True, verify=False)


def inputs(length: int) -> torch.Tensor:
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(length))


@pytest.mark.slow
@torch.no_grad()
def test_requests_of_different_lengths_at_once(engine, model):
    """Each thread has lengths of its own, some of which are compiled while others run; no result is another's."""
    groups = (8, 11), (16, 9), (21, 23)
    expected = {length: model(inputs(length)) for group in groups for length in group}
    wrong, running, most = [], set(), []
    start = threading.Barrier(len(groups))

    def serve(group):
        start.wait()
        for number in range(ROUNDS):
            length = group[number % 2]
            running.add(group)
            most.append(len(running))
            out = engine(inputs(length))
            running.discard(group)
            if out.shape != expected[length].shape or (out - expected[length]).abs().max() > 1e-4:
                wrong.append((number, length))

    threads = [threading.Thread(target=serve, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong and max(most) > 1


@pytest.mark.slow
@torch.no_grad()
def test_a_length_is_served_while_another_is_compiled(engine, model, monkeypatch):
    """A request does not wait for the compilation that a request of another length began."""
    ready, new = inputs(16), inputs(13)
    engine(ready)
    building, go_on, build = threading.Event(), threading.Event(), engine._build_one

    def slow(*args):
        building.set()
        assert go_on.wait(60)
        return build(*args)

    monkeypatch.setattr(engine, "_build_one", slow)
    results = []
    thread = threading.Thread(target=lambda: results.append(engine(new)))
    thread.start()
    assert building.wait(60)
    started = time.perf_counter()
    torch.testing.assert_close(engine(ready), model(ready), atol=1e-4, rtol=1e-4)
    assert time.perf_counter() - started < 30 and not results
    go_on.set()
    thread.join(120)
    torch.testing.assert_close(results[0], model(new), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@torch.no_grad()
def test_memory_stays_flat_over_calls_of_random_lengths(engine, model):
    """Every length is called in the warm-up; then what a call leaves behind would grow in each window of calls."""
    lengths, numbers = list(range(LEAST, MOST + 1)), random.Random(0)
    for number in range(WARM_UP):
        engine(inputs(lengths[number % len(lengths)]))
    grown = []
    for _ in range(WINDOWS):
        gc.collect()
        before = resident()
        for _ in range(CALLS // WINDOWS):
            x = inputs(numbers.choice(lengths))
            out = engine(x)
        grown.append(resident() - before)
    assert out.shape == x.shape and len(engine.report().engines) == len(lengths)
    assert min(grown) < GROWTH, grown


def test_what_is_kept_is_seen(model):
    """The bound of the test above is below what a window of calls returns."""
    assert CALLS // WINDOWS * LEAST * WIDTH * 4 > 1.9 * GROWTH
