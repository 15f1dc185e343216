"""What masks and rules keep of each attention of a model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError, UnsupportedError


class Attend(nn.Module):
    def __init__(self, causal=False, scale=None):
        super().__init__()
        self.causal, self.scale = causal, scale

    def forward(self, q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=self.causal, scale=self.scale, enable_gqa=True)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.near, self.far = Attend(causal=True), Attend(scale=0.7)
        self.train()

    def forward(self, q, k):
        return self.near(q, k) + self.far(q, k)


@pytest.fixture
def tensors():
    torch.manual_seed(0)
    return torch.randn(2, 4, 96, 16), torch.randn(2, 2, 96, 16)


def test_each_attention_has_its_recall_and_density(tensors):
    model, window = Two(), masks.sliding_window(8)
    rule = masks.runtime.top_blocks(1, block=32)
    near, far = stof_tvm.explain_attention(model, tensors, {"near": window, "far": rule})
    assert (near.path, near.mask, far.path, far.mask) == ("near", repr(window), "far", repr(rule))
    expected = masks.recall(window, *tensors, within=masks.causal())
    torch.testing.assert_close(near.recall, expected.heads)
    torch.testing.assert_close(far.recall, masks.recall(rule, *tensors, scale=0.7).heads)
    both = (masks.causal() & window).dense(96).sum() / masks.causal().dense(96).sum()
    torch.testing.assert_close(near.density, both.double().expand(2, 4), rtol=1e-6, atol=0)
    torch.testing.assert_close(far.density, torch.full((2, 4), 1 / 3, dtype=torch.float64))
    assert model.near.training


def test_the_table_names_attentions_and_what_has_no_mask(tensors):
    found = stof_tvm.explain_attention(Two(), {"q": tensors[0], "k": tensors[1]}, {"far": masks.a_shape(1, 5)}, rows=16)
    lines = str(found).splitlines()
    assert "'near', no mask given" in lines[1] and "100.0%" in lines[1]
    assert "'far', a_shape(1, 5)" in lines[2] and len(lines) == 3
    assert (found[0].recall == 1).all() and (found[0].density == 1).all()


@pytest.mark.parametrize(
    "mask, error, what",
    [
        (
            {"middle": masks.causal()},
            MaskError,
            "path 'middle' matches no attention .*: 'near', 'far'",
        ),
        ({"near": masks.causal(), "fra": masks.causal()}, MaskError, "path 'fra' matches no attention of the model"),
        (None, MaskError, "mask is None: explain_attention says what a mask or a rule keeps"),
        ({}, MaskError, "names no attention"),
        ({"near": masks.padding([3, 4, 5])}, MaskError, "batch"),
        ({"near": 3}, MaskError, "near"),
    ],
)
def test_masks_that_do_not_fit(tensors, mask, error, what):
    with pytest.raises(error, match=what):
        stof_tvm.explain_attention(Two(), tensors, mask)


def test_models_and_samples_that_cannot_be_explained(tensors):
    with pytest.raises(InputError, match="computes no attention"):
        stof_tvm.explain_attention(nn.Linear(4, 4), torch.randn(2, 4), masks.causal())
    for model in (3, lambda q, k: q):
        with pytest.raises(InputError, match="model must be a torch.nn.Module, got"):
            stof_tvm.explain_attention(model, tensors, masks.causal())
    with pytest.raises(InputError, match="a sample is a tuple"):
        stof_tvm.explain_attention(Two(), 3, masks.causal())

    class Dropped(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, dropout_p=0.5, enable_gqa=True)

    with pytest.raises(UnsupportedError, match="dropout"):
        stof_tvm.explain_attention(Dropped(), tensors, masks.causal())
