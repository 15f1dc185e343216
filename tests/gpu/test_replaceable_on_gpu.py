"""Engines whose masks are replaced, on a GPU: right for every mask, on streams, as CUDA graphs, after saving."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from tests.stof_tvm.test_replaceable_masks import LENGTH, REPLACEMENTS, Layers, expected

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Layers().half().cuda().eval()


@pytest.fixture(scope="module")
def call():
    torch.manual_seed(1)
    shapes = (2, LENGTH, 32), (2, 1, 1, LENGTH)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes)


@pytest.fixture(scope="module")
def engine(model, call):
    return stof_tvm.build(model, None, call, masks.sliding_window(6), replaceable_masks=True)


def reference(mask, call):
    torch.manual_seed(0)
    return expected(Layers().eval(), mask, *(x.float().cpu() for x in call))


@pytest.mark.parametrize("mask", REPLACEMENTS, ids=repr)
def test_any_mask(mask, engine, call):
    """Run as it is, captured, replayed; the first engine's graph in between."""
    other, wanted = engine.with_mask(mask), reference(mask, call)
    for _ in range(4):
        assert (other(*call).float().cpu() - wanted).abs().max() < 1e-2
        engine(*call)
    assert other.report().execution == "replays of a CUDA graph"


def test_streams_take_turns(engine, call):
    windows = [masks.sliding_window(width) for width in (1, 5, 30)]
    wanted = [reference(mask, call) for mask in windows]
    views, streams = [engine.with_mask(mask) for mask in windows], [torch.cuda.Stream() for _ in windows]
    for _ in range(4):
        found = []
        for view, stream in zip(views, streams):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(5_000_000)
                found.append(view(*call))
        torch.cuda.synchronize()
        assert all((x.float().cpu() - y).abs().max() < 1e-2 for x, y in zip(found, wanted))


def test_saved(engine, call, tmp_path):
    engine.save(tmp_path / "a.stof")
    loaded = stof_tvm.load(tmp_path / "a.stof")
    for mask in REPLACEMENTS[:3]:
        assert torch.equal(loaded.with_mask(mask)(*call), engine.with_mask(mask)(*call))
