"""Batches without padding on a GPU: lists that it writes itself, for any lengths, streams and threads, in one graph."""

import copy
import threading

import numpy as np
import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError
from stof_tvm.packed import device_lists, row_engines
from tests.stof_tvm.packed.test_packed_engine import LONGEST, Encoder, batch, check

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
TOLERANCE = 2e-2


def lengths_at_random(seed):
    rng = np.random.default_rng(seed)
    return rng.integers(1, LONGEST + 1, rng.integers(1, 12)).tolist()


@pytest.fixture(scope="module")
def model():
    return Encoder(torch.float16).eval()


@pytest.fixture(scope="module")
def exact(model):
    return copy.deepcopy(model).float()


@pytest.fixture(scope="module")
def engine(model):
    ids, mask = batch([LONGEST, 5, 1])
    return stof_tvm.build(copy.deepcopy(model).cuda(), None, (ids.cuda(), mask.cuda()), without_padding=True)


def compare(exact, found, ids, mask):
    found = {"states": found["states"].float().cpu(), "pooled": tuple(x.float().cpu() for x in found["pooled"])}
    check(exact, found, ids, mask, TOLERANCE)


def rows(engine):
    return list(engine._rows.engines.entries.values())


def test_any_lengths(engine, exact):
    for seed in range(40):
        lengths = lengths_at_random(seed)
        ids, mask = batch(lengths, left=seed % 2 == 1, seed=seed)
        compare(exact, engine(ids.cuda(), mask.cuda()), ids, mask)
    assert rows(engine) and all(row.lists is not None for row in rows(engine))
    assert all(row.engine.report().execution == "replays of a CUDA graph" for row in rows(engine)[:1])
    assert not engine._rows.plans.entries


def test_new_lengths_wait_for_nothing(engine, exact):
    """Neither for the GPU nor for a compiler."""
    given = [batch([3, LONGEST, 1, n], seed=n) for n in range(1, 9)]
    on_gpu = [(ids.cuda(), [3, LONGEST, 1, n]) for n, (ids, _) in enumerate(given, 1)]
    for _ in range(3):
        engine(on_gpu[0][0], lengths=on_gpu[0][1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [engine(ids, lengths=lengths) for ids, lengths in on_gpu]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for (ids, mask), out in zip(given, found):
        compare(exact, out, ids, mask)


def test_the_cpu_writes_the_same(model, exact, monkeypatch):
    monkeypatch.setattr(device_lists, "MOST_BYTES", 0)
    ids, mask = batch([LONGEST, 5, 1])
    engine = stof_tvm.build(copy.deepcopy(model).cuda(), None, (ids.cuda(), mask.cuda()), without_padding=True)
    for seed in range(4):
        ids, mask = batch(lengths_at_random(seed), seed=seed)
        compare(exact, engine(ids.cuda(), mask.cuda()), ids, mask)
    assert all(row.lists is None for row in rows(engine))


def test_masks_inside(model, exact):
    """By distance the GPU plans, any other mask is planned by the CPU."""
    for mask, on_gpu in ((masks.sliding_window(4), True), (masks.global_tokens([0]) | masks.causal(), False)):
        ids, padding = batch([LONGEST, 5, 1])
        engine = stof_tvm.build(
            copy.deepcopy(model).cuda(), None, (ids.cuda(), padding.cuda()), mask, without_padding=True
        )
        given = copy.deepcopy(exact)
        for layer in given.layers:
            layer.given = mask
        for seed in range(6):
            ids, padding = batch(lengths_at_random(seed), seed=seed)
            compare(given, engine(ids.cuda(), padding.cuda()), ids, padding)
        assert all((row.lists is not None) == on_gpu for row in rows(engine))


def test_streams_and_threads_take_turns(engine, exact):
    given = [batch(lengths_at_random(seed), seed=seed) for seed in range(12)]
    found, failures = {}, []

    def run(numbers):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for n in numbers:
                    ids, mask = given[n]
                    torch.cuda._sleep(2_000_000)
                    found[n] = engine(ids.cuda(), lengths=mask.sum(1).tolist())
                torch.cuda.current_stream().synchronize()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(range(first, 12, 3),)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for n, (ids, mask) in enumerate(given):
        compare(exact, found[n], ids, mask)


def test_a_graph_of_the_callers_own(engine, exact):
    """It plans its own lengths, whatever was called in between; so do calls after it."""
    first, second = batch([7, 2, 24], seed=5), batch([1, 20, 12], seed=6)
    lengths = [mask.sum(1).tolist() for _, mask in (first, second)]
    ids = first[0].cuda()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InputError, match="before one that is captured"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            engine(ids, lengths=[24, 2, 7])
    torch.cuda.synchronize()
    for _ in range(3):
        engine(ids, lengths=lengths[0])
    with torch.cuda.graph(graph):
        out = engine(ids, lengths=lengths[0])
    for _ in range(2):
        compare(exact, engine(second[0].cuda(), lengths=lengths[1]), *second)
        graph.replay()
        compare(exact, out, *first)
    compare(exact, engine(second[0].cuda(), lengths=lengths[1]), *second)


def test_rows_of_many_lengths(engine, exact):
    """Fuller and longer rows, the last of which sequences fill."""
    for lengths in ([LONGEST] * 8, [LONGEST] * 30, [1] * 64, [5, 24] * 13):
        ids, mask = batch(lengths, seed=len(lengths))
        for _ in range(3):
            compare(exact, engine(ids.cuda(), mask.cuda()), ids, mask)
    assert len(rows(engine)) >= 3 and row_engines.MOST_ENGINES >= 3
