"""What PyTorch's own backends give differently is no error of an engine's."""

import math

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.verification.backends import plain_pytorch

S = 8


class Sdpa(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


class Filled(torch.nn.Module):
    """A mask of the model's own by a finite fill."""

    def forward(self, q, k, v):
        x = (q @ k.mT / 2).masked_fill(torch.ones(S, S).triu(1) == 0, -1e9)
        return x.softmax(-1) @ v


def inputs():
    return tuple(torch.randn(3, 1, 2, S, 4, generator=torch.Generator().manual_seed(0)))


def test_scores_of_nan():
    q, k, v = inputs()
    q[0, 0, 1, 2], k = math.nan, torch.zeros_like(k)
    assert stof_tvm.build(Sdpa(), "llvm", (q, k, v)).report().verification.result == "passed"


def test_a_wholly_masked_row_of_an_encoder_layer():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    padding = torch.zeros(2, S, dtype=torch.bool)
    padding[1, 0] = True
    mask = torch.ones(S, S, dtype=torch.bool).triu(1)
    call = {"src_mask": mask, "src_key_padding_mask": padding}
    x = torch.randn(2, S, 8)
    assert stof_tvm.build(layer, "llvm", (x,), example_kwargs=call).report().verification.result == "passed"


@pytest.mark.parametrize("magnitude", [1, 1e6])  # scores of -1e6 are no fills, low as they are
def test_rows_of_fills_that_a_given_mask_leaves(magnitude):
    """Rows from 5 on keep only what the model filled, row 7 was filled throughout."""
    columns = (torch.arange(S) == 5).expand(S, S) | torch.eye(S, dtype=torch.bool)
    q, k, v = inputs()
    report = stof_tvm.build(Filled(), "llvm", (q * magnitude, k, v), masks.from_tensor(columns)).report()
    assert report.verification.result == "passed"


def test_what_is_switched_is_switched_back():
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    with pytest.raises(ValueError), plain_pytorch():
        assert not torch.backends.mha.get_fastpath_enabled() and not torch.backends.cuda.flash_sdp_enabled()
        raise ValueError
    assert before == (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled())


def test_exponentials_that_overflow_in_pytorch_only():
    """Without the row's maximum they do in float32: the engine's numbers are those of float64."""

    class Plain(torch.nn.Module):
        def forward(self, q, k, v):
            e = (q @ k.mT).exp()
            return (e / e.sum(-1, keepdim=True)) @ v

    q, k, v = inputs()
    assert not Plain()(q * 10, k * 10, v).isfinite().all()
    report = stof_tvm.build(Plain(), "llvm", (q * 10, k * 10, v)).report()
    assert report.verification.result == "passed"


@pytest.mark.parametrize(
    "choose",
    [
        lambda x: x.topk(4),
        lambda x: x.topk(3, dim=0, largest=False),
        lambda x: x.sort(descending=True),
        lambda x: x.argsort(0),
        lambda x: x.kthvalue(7),
        lambda x: x.topk(4).indices.float().sum(-1),
    ],
)
def test_the_order_of_equal_numbers_is_open(choose):
    class Chooses(torch.nn.Module):
        def forward(self, x):
            return choose(x.relu())

    x = torch.randn(30, 40, generator=torch.Generator().manual_seed(0)).round()
    report = stof_tvm.build(Chooses(), "llvm", (x,), tuning_logs=False).report()
    assert report.verification.result == "passed"


def test_equal_numbers_stay_in_their_order():
    x = torch.tensor([[3.0, 1.0, 3.0, 2.0]])
    with plain_pytorch():
        assert x.topk(3).indices.tolist() == [[0, 2, 3]] and x.sort().indices.tolist() == [[1, 3, 0, 2]]
