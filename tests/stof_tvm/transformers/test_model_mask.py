"""Masks of transformers as blocks keep what `sdpa_mask` keeps, follow each change, and are tensors if read."""

import copy

import pytest
import torch
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function as causal
from transformers.masking_utils import sdpa_mask

from stof_tvm.errors import MaskError
from stof_tvm.masks import compilation
from stof_tvm.transformers import model_mask
from stof_tvm.transformers.model_mask import ModelMask, stof_mask
from tests.stof_tvm.transformers.conftest import by_eager, padding

POSITIONS = torch.cat([torch.arange(30), torch.arange(50)]).expand(2, -1)
SEQUENCES = (torch.arange(80) >= 30).long().expand(2, -1)
IMAGES = torch.where(torch.arange(80) // 10 % 2 == 0, torch.arange(80) // 10, -1).expand(2, -1)
FUNCTIONS = {
    "causal": causal,
    "both sides": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(7),
    "window of both sides": masking_utils.sliding_window_bidirectional_mask_function(7),
    "chunks": masking_utils.chunked_causal_mask_function(16, torch.tensor([0, 5])),
    "packed": masking_utils.packed_sequence_compatibility_function(causal, POSITIONS, SEQUENCES),
    "images": masking_utils.or_masks(causal, masking_utils.blockwise_overlay(IMAGES)),
    "custom": masking_utils.and_masks(causal, lambda b, h, q, kv: (q + kv) % 3 != b),
}


@pytest.mark.parametrize("place", [(80, 80, 0, 0), (20, 60, 40, 0), (3, 11, 25, 17)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_blocks_keep_what_the_tensor_keeps(name, place):
    q_len, kv_len, q_offset, kv_offset = place
    kept = torch.ones(2, 80, dtype=torch.bool)
    kept[1, 22:] = False
    sizes = dict(batch_size=2, q_length=q_len, kv_length=kv_len, q_offset=torch.tensor(q_offset), kv_offset=kv_offset)
    for padding_mask in (None, kept):
        arguments = dict(sizes, mask_function=FUNCTIONS[name], attention_mask=padding_mask, use_vmap=name == "custom")
        expected = sdpa_mask(**arguments, allow_is_causal_skip=False)
        mask = stof_mask(**arguments)
        assert mask.shape == expected.shape and torch.equal(mask.dense(), expected)
        assert torch.equal(mask.blocks.dense(q_len, kv_len).expand_as(expected), expected)
        compiled = mask.blocks.compile(q_len, kv_len)
        assert compiled.density == pytest.approx(expected.double().mean().item())


def test_what_keeps_all_is_no_mask():
    both, kept = masking_utils.bidirectional_mask_function, torch.ones(2, 8, dtype=torch.bool)
    arguments = dict(batch_size=2, q_length=8, kv_length=8, mask_function=both, attention_mask=kept)
    assert stof_mask(**arguments, allow_is_bidirectional_skip=True) is None
    assert isinstance(stof_mask(**arguments, allow_is_bidirectional_skip=False), ModelMask)
    kept[1, 6:] = False
    mask = stof_mask(**arguments, allow_is_bidirectional_skip=True)
    assert isinstance(mask, ModelMask) and mask._tensors == {}  # nobody read it
    window = dict(arguments, attention_mask=None, allow_is_bidirectional_skip=True)
    assert stof_mask(**window, local_size=8) is not None and stof_mask(**window, local_size=9) is None


def test_a_mask_is_a_tensor_to_whoever_reads_it():
    mask = stof_mask(2, 8, 8)
    expected = torch.ones(8, 8, dtype=torch.bool).tril().expand(2, 1, 8, 8)
    assert isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.shape == expected.shape
    assert mask.contiguous() is mask and mask.to("cpu") is mask
    for of in (lambda x: x[..., 2:], torch.logical_not, lambda x: torch.cat([x, x], -1), lambda x: x.float() * 2):
        assert type(of(mask)) is torch.Tensor and torch.equal(of(mask), of(expected))
    assert repr(mask).startswith("ModelMask(batch_size=2, ") and stof_mask(2, 8, 8, attention_mask=mask) is mask


def test_equal_masks_are_compiled_once(decoder, ids, monkeypatch):
    """For all layers and calls with equal padding; another padding, and a written one, make other masks."""
    model = decoder("Llama", num_hidden_layers=3)
    compiled, real = [], compilation._compile
    monkeypatch.setattr(compilation, "_compile", lambda mask, *args: compiled.append(args) or real(mask, *args))
    kept = padding("right")
    kept[0, 12:] = 0  # a padding that no other test has

    def call():
        with torch.no_grad():
            before, out = len(compiled), model(ids, attention_mask=kept)[0]
        torch.testing.assert_close(
            out[kept.bool()], by_eager(model, ids, attention_mask=kept)[kept.bool()], atol=2e-5, rtol=1e-4
        )
        return len(compiled) - before

    assert call() >= 1 and call() == 0
    kept = kept.clone()
    assert call() == 0
    kept[1, 8:] = 0  # in place
    assert call() >= 1
    kept[1, 8:10] = 1
    assert call() == 0


def test_a_mask_holds_what_it_was_made_of():
    kept = torch.ones(1, 8, dtype=torch.bool)
    mask = stof_mask(1, 8, 8, attention_mask=kept)
    kept[:, 4:] = False
    assert mask.blocks.dense(8).sum() == 36 == mask.dense().sum()
    numbers = SEQUENCES[:1, :8].clone()
    mask = stof_mask(1, 8, 8, mask_function=masking_utils.packed_sequence_mask_function(numbers))
    blocks = mask.blocks
    numbers[:, 4:] = 1
    with pytest.raises(MaskError, match="a tensor that a model's mask reads was written to before the mask was used"):
        blocks.compile(8)


def test_padding_that_does_not_fit():
    mask = stof_mask(1, 8, 8, attention_mask=torch.ones(1, 1, 8, dtype=torch.bool))
    with pytest.raises(MaskError, match=r"a padding mask has two dimensions, \(batch, keys\), got shape \(1, 1, 8\)"):
        mask.blocks  # noqa: B018
    with pytest.raises(MaskError, match="padding of 8 keys does not fit kv_len=9"):
        model_mask.key_padding(torch.zeros(1, 8, dtype=torch.bool).numpy()).dense(9)


def test_long_windows_make_no_square():
    """65,536² elements would take minutes and 4 GB."""
    window = masking_utils.sliding_window_causal_mask_function(256)
    kept = torch.ones(2, 1 << 16, dtype=torch.bool)
    kept[1, -100:] = False
    mask = stof_mask(2, 1 << 16, 1 << 16, mask_function=window, attention_mask=kept)
    assert mask.blocks.density(1 << 16) == pytest.approx(256 / (1 << 16), rel=0.01)
    assert copy.copy(mask._tensors) == {}
