"""Masks given to `engines`: tokens are those of eager transformers with the same mask, applied densely."""

import pytest
import torch

from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError
from stof_tvm.generation import engines, entry
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import WINDOW, small, tokens

LENGTH = 64
DOCUMENTS = masks.causal() & masks.document([20, 14, 30])
PER_HEAD = masks.per_head([masks.a_shape(2, 3), DOCUMENTS, masks.strided(5), masks.sliding_window(8)])


@torch.no_grad()
def chosen(model, ids, keep, count, window=LENGTH):
    """Tokens chosen greedily by whole forwards of a model, with a mask (L, L) or (1, H, L, L) beside the causal one."""
    place = torch.arange(LENGTH)
    distance = place[:, None] - place
    keep = keep.view(1, -1, LENGTH, LENGTH) & (distance >= 0) & (distance < window)
    for _ in range(count):
        n = ids.shape[1]
        logits = model(ids, attention_mask=keep[:, :, :n, :n], use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return ids


@pytest.mark.slow
def test_tokens_are_those_of_the_dense_mask():
    """Sinks, documents, strides and windows, of a head each."""
    model, ids = small("qwen3"), tokens(1, 21)
    found = engines(model, max_length=LENGTH, prompt=24, target=QUICK_LLVM, mask=PER_HEAD)
    dense = PER_HEAD.dense(LENGTH)
    expected = chosen(model, ids, dense, LENGTH - 21)
    assert torch.equal(found.generate(ids, max_new_tokens=LENGTH - 21, do_sample=False), expected)
    plain = model.generate(ids, max_new_tokens=LENGTH - 21, do_sample=False)
    assert not torch.equal(plain, expected)  # else the mask might have no effect


@pytest.mark.slow
def test_a_mask_by_path_beside_the_models_own_window():
    model, ids = small("mistral"), tokens(2, 21)
    mask = {"model.layers.*": masks.strided(5)}
    found = engines(model, max_length=LENGTH, batch=2, prompt=24, target=QUICK_LLVM, mask=mask)
    expected = chosen(model, ids, masks.strided(5).dense(LENGTH), 30, WINDOW)
    assert torch.equal(found.generate(ids, max_new_tokens=30, do_sample=False), expected)
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    with pytest.raises(InputError, match=r"with a mask, the prompts of a batch must have one length, .* \[18, 21\]"):
        found.generate(ids, padding, max_new_tokens=2)


@pytest.mark.slow
@torch.no_grad()
def test_keys_that_the_models_own_masks_skip_are_not_read():
    """Gemma 2: the first layer has a window, the second is causal, and neither reads slots that nothing wrote yet."""
    model, ids = small("gemma2"), tokens(1, 27)
    found = engines(model, max_length=LENGTH, prompt=32, target=QUICK_LLVM)
    assert found.sizes.is_of_one_length
    expected = model.generate(ids, max_new_tokens=LENGTH - 27, do_sample=False)
    assert torch.equal(found.generate(ids, max_new_tokens=LENGTH - 27, do_sample=False), expected)
    first, second = (str(row) for row in found._step.report().rewritten)
    assert "and_mask" in first and "causal()" in second
    found.prompt(ids)
    token = tokens(1, 1)
    for name, slots in (("keys_0", slice(0, 27 - WINDOW)), ("keys_0", slice(28, None)), ("keys_1", slice(28, None))):
        found._step.state[name][:, :, slots] = float("nan")
    text = torch.cat([ids, token], 1)
    torch.testing.assert_close(found.step(token), model(text).logits[:, -1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    "mask, error",
    [
        (
            torch.ones(32, 32, dtype=torch.bool),
            r"of shape \(32, 32\) does not broadcast to \(B, H, Sq, Skv\) = \(1, 4, 64, 64\): rows and columns are "
            "positions, of which there are max_length=64",
        ),
        (torch.ones(LENGTH, LENGTH), "a mask tensor must be bool"),
        ({"model.layers.0": None}, "leave the path out"),
        (
            {"decoder": masks.causal()},
            "mask path 'decoder' matches no attention of the model; there are: 'model.layers.0.self_attn'",
        ),
    ],
)
def test_masks_that_do_not_fit(mask, error):
    with pytest.raises(MaskError, match=error):
        engines(small("qwen3"), max_length=LENGTH, target=QUICK_LLVM, mask=mask)


def test_equal_masks_have_the_same_engines():
    """`generate` knows its engines by what a mask keeps."""
    tensor = torch.rand(8, 8) < 0.5
    for mask in (lambda: masks.a_shape(2, 6), tensor.clone, lambda: {"model.layers.*": masks.strided(3)}):
        assert entry._identity(mask()) == entry._identity(mask())
    assert entry._identity(masks.a_shape(2, 6)) != entry._identity(masks.a_shape(2, 7))
    assert entry._identity({"a": PER_HEAD}) != entry._identity({"b": PER_HEAD})


@pytest.mark.parametrize("path", ["model.layers.0", "model.layers.0.self_attn", "*layers.0*"])
def test_paths_are_those_of_the_model(path):
    found = engines(small("qwen3"), max_length=LENGTH, target=QUICK_LLVM, mask={path: masks.strided(5)}, verify=False)
    sites = found._step.report().sites
    assert [site.site for site in sites] == [f"model.layers.{n}.self_attn" for n in range(len(sites))]
    assert ["strided" in str(site.mask) for site in sites] == [True] + [False] * (len(sites) - 1)
    assert "model.model" not in str(found.report())
