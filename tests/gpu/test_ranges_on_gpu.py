"""Ranges of shapes on a GPU: built in forks, graphs captured at the build, and equal to PyTorch at every length."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import masks
from stof_tvm.buckets import workers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
RANGE = {"src": {0: Dim("batch", max=3), 1: Dim("length", min=2, max=200)}}
BUCKETS = {"src[0]": [1, 3], "src[1]": [64, 200]}
MASK = masks.sliding_window(16)


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu", norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).half().eval()


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def ranged(request):
    """A model on a device, and its engine, built with two forks at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "WORTH_S", 0.0)
        model = encoder().to(request.param)
        x = torch.randn(2, 50, 64, dtype=torch.float16, device=request.param)
        with warnings.catch_warnings(record=True) as told, torch.no_grad():
            warnings.simplefilter("always")
            engine = stof_tvm.build(model, None, (x,), MASK, dynamic_shapes=RANGE, buckets=BUCKETS)
        assert not [str(x.message) for x in told if "a fork could not" in str(x.message)]
    return copy.deepcopy(model).float().cuda(), engine


def test_graphs_are_captured_at_the_build(ranged):
    _, engine = ranged
    built = engine._kept().values()
    assert len(built) == 4 and all(own.prepare().is_captured for own in built)


@torch.no_grad()
@pytest.mark.parametrize("batch, length", [(1, 200), (3, 64), (2, 33), (3, 199), (1, 2), (2, 65)])
def test_calls_are_pytorchs(ranged, batch, length):
    model, engine = ranged
    kept = MASK.dense(length).cuda()
    for _ in range(2):
        x = torch.randn(batch, length, 64, dtype=torch.float16, device="cuda")
        expected = model(x.float(), mask=~kept)
        half = (encoder().cuda()(x, mask=~kept).float() - expected).abs().max()
        assert (engine(x).float() - expected).abs().max() <= 2 * half
