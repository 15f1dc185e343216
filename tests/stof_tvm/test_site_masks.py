import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import stof_tvm
from relax_passes.attention.attention_site import AttentionSite
from stof_tvm import masks
from stof_tvm.site_masks import SiteMasks
from stof_tvm.verification.reference import reference_outputs
from tests.stof_tvm.rows import ROW
from tir_kernels.errors import MaskError, StofError

B, H, S, D = 2, 4, 32, 32
SIZES = B, H, S, S
WINDOW = masks.sliding_window(3)
WIDTHS = torch.tensor([1, 2, 4, 8])


def window(b, h, i, j):
    return (i - j).abs() <= 3


def window_of_head(b, h, i, j):
    return (i - j).abs() <= WIDTHS[h]


SPELLINGS = {
    "tensor": lambda: WINDOW.dense(S),
    "tensor of four dimensions": lambda: WINDOW.dense(S).expand(B, H, S, S),
    "array": lambda: WINDOW.dense(S).numpy(),
    "block mask": lambda: create_block_mask(window, None, None, S, S, device="cpu"),
    "function": lambda: window,
}


def given_for(mask, path="layer.0"):
    return SiteMasks(mask).given_for(path, SIZES)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_what_sparse_attention_takes(spelling):
    given = given_for(SPELLINGS[spelling]())
    assert torch.equal(given.dense(S).expand(B, H, S, S), WINDOW.dense(S).expand(B, H, S, S))


def test_a_function_that_tells_heads_apart():
    given = given_for(window_of_head)
    assert given.heads == H and given.batch is None
    expected = torch.stack([masks.sliding_window(int(n)).dense(S) for n in WIDTHS])
    assert torch.equal(given.dense(S)[0], expected)


def test_keys_that_all_rows_share():
    keys = torch.arange(S) < 20
    assert torch.equal(given_for(keys).dense(S), keys.expand(S, S))


def test_by_path_and_with_the_models_own():
    site_masks = SiteMasks({"layer": window, "layer.1": WINDOW.dense(S)})
    assert site_masks.is_given("layer.0") and not site_masks.is_given("other")
    assert torch.equal(site_masks(AttentionSite("layer.0", "", None, SIZES)).dense(S), WINDOW.dense(S))
    both = site_masks(AttentionSite("layer.1", "top-left", None, SIZES))
    assert torch.equal(both.dense(S), (WINDOW & masks.causal()).dense(S))
    assert site_masks(AttentionSite("other", "", None, SIZES)) is None


def test_layers_share_what_was_made():
    site_masks = SiteMasks(WINDOW.dense(S))
    assert site_masks.given_for("layer.0", SIZES) is site_masks.given_for("layer.1", SIZES)


@pytest.mark.parametrize(
    "mask, told",
    [
        (7, "mask must be a Mask.*got int 7"),
        ("causal()", "mask is the text 'causal"),
        (torch.nn.Linear, "got type <class"),
        (masks.causal, r"call it: masks\.causal\(\)"),
        (masks.runtime.top_blocks, r"makes a rule; call it: masks\.runtime\.top_blocks\(…\)"),
        (masks.runtime.xattention, r"makes a rule; call it: masks\.runtime\.xattention\(\)"),
        (WINDOW.dense(S).float(), r"must be bool .*float32.*masks\.from_tensor"),
        (np.zeros((S, S)), r"must be bool .*float64"),
        ({"layer": 7}, "mask for 'layer': .*got int 7"),
        ({3: WINDOW}, "keys are module paths, got int"),
    ],
)
def test_what_is_no_mask(mask, told):
    with pytest.raises(MaskError, match=told) as raised:
        SiteMasks(mask)
    assert len(str(raised.value)) < 250


def test_a_tensor_of_other_lengths_names_the_attention():
    with pytest.raises(MaskError, match=rf"attention 'layer.0': .*\({S - 1}, {S}\).*\(2, 4, {S}, {S}\)"):
        given_for(WINDOW.dense(S)[1:])
    with pytest.raises(MaskError, match=r"attention \(the model\): "):
        given_for(WINDOW.dense(S)[1:], "")


class Sdpa(torch.nn.Module):
    def forward(self, x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("mask, told", [(WINDOW.dense(S)[1:], "does not broadcast"), ({"layer": WINDOW}, "there are:")])
def test_an_attention_of_the_model_itself_has_no_path(mask, told):
    with pytest.raises(MaskError, match=told) as raised:
        stof_tvm.build(Sdpa(), "llvm", (torch.randn(1, H, S, 8),), mask)
    assert "(the model)" in str(raised.value) and "''" not in str(raised.value)


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(D, H, D, batch_first=True).eval()


@pytest.mark.parametrize("mask", [window_of_head, WINDOW.dense(S).numpy()], ids=["function", "array"])
def test_build(layer, mask):
    x = torch.randn(B, S, D)
    engine = stof_tvm.build(layer, "llvm", (x,), mask)
    assert engine.report().verification.result == "passed"
    assert engine.report().sites[0].density < 0.5
    keep = masks.from_mask_mod(window_of_head, heads=H) if callable(mask) else WINDOW
    with torch.no_grad():
        expected = layer(x, src_mask=~keep.dense(S).expand(B, H, S, S).flatten(0, 1))
    torch.testing.assert_close(engine(x), expected, atol=1e-5, rtol=1e-5)
    (reference,) = reference_outputs(layer, (x,), report=engine.report(), mask=mask)
    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=1e-5)


def test_tune_refuses_what_build_refuses(layer, tmp_path):
    with pytest.raises(StofError, match="must be bool"):
        stof_tvm.tune(layer, "llvm", (torch.randn(B, S, D),), torch.zeros(S, S), work_dir=tmp_path, progress=False)


@pytest.mark.parametrize("name", ["", "(the model)"])
def test_the_models_own_attentions_go_by_the_name_that_they_are_shown_by(name):
    site_masks = SiteMasks({name: WINDOW})
    assert site_masks.is_given("") and site_masks.is_given("#1") and not site_masks.is_given("layer.0")
    with pytest.raises(MaskError, match=r"mask path \(the model\) matches no attention of the model"):
        site_masks.check([ROW])


def test_no_paths_are_no_masks():
    with pytest.raises(MaskError, match="names no attention: leave mask out"):
        SiteMasks({})
