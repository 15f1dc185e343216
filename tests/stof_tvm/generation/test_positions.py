"""Masks for tokens at positions: transformers' own where it has them, also in calls of others at the same time."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    eager_mask,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from stof_tvm.generation.positions import at_positions, mask_at, mask_functions
from tests.stof_tvm.generation.conftest import small, tokens

FUNCTIONS = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(5),
    "chunks": chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("offset", [3, torch.tensor(3)], ids=["number", "tensor"])
@pytest.mark.parametrize("padding", [None, torch.arange(16).expand(2, 16) >= torch.tensor([[0], [6]])])
def test_masks_are_those_of_transformers(name, offset, padding):
    sizes = dict(batch_size=2, q_length=4, kv_length=16, q_offset=offset, mask_function=FUNCTIONS[name])
    expected = sdpa_mask(**sizes, attention_mask=padding, allow_is_causal_skip=False)
    assert torch.equal(mask_at(**sizes, attention_mask=padding).expand(2, 1, 4, 16), expected)
    added = mask_at(**sizes, attention_mask=padding, is_added=True, dtype=torch.float16)
    expected = eager_mask(**sizes, attention_mask=padding, dtype=torch.float16)
    assert added.dtype == torch.float16 and torch.equal(added.expand(2, 1, 4, 16), expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_sequence_has_the_row_of_its_position(name):
    found = mask_at(2, 1, 16, q_offset=torch.tensor([3, 9]), mask_function=FUNCTIONS[name])
    whole = sdpa_mask(2, 16, 16, mask_function=FUNCTIONS[name], allow_is_causal_skip=False)
    assert torch.equal(found, torch.stack([whole[0, :, 3:4], whole[1, :, 9:10]]))


def test_a_causal_prompt_needs_no_tensor():
    assert mask_at(1, 8, 8) is None
    assert mask_at(1, 8, 8, mask_function=FUNCTIONS["window"]) is not None
    assert mask_at(1, 8, 8, is_added=True) is not None


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_other_calls_compute_what_they_always_do(name):
    model, ids = small(name), tokens(2, 20)
    padding = torch.ones_like(ids)
    padding[0, :6] = 0
    expected = model(ids).logits, model(ids, attention_mask=padding).logits
    before = model.config._attn_implementation
    with at_positions(model):
        found = model(ids).logits, model(ids, attention_mask=padding).logits
        assert model.config._attn_implementation != before
    assert model.config._attn_implementation == before
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_functions_of_masks_are_found_by_attention():
    ids = tokens(1, 3)
    for name, windows in (("llama", [False, False]), ("mistral", [True]), ("gemma2", [True, False])):
        model = small(name)
        found = mask_functions(model, lambda model=model: model(ids))
        assert list(found) == [f"model.layers.{n}.self_attn" for n in range(len(windows))]
        assert [function is not causal_mask_function for function in found.values()] == windows
