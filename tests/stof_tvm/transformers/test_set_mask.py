"""`set_mask`: a user's mask holds beside the model's own, at each position, or an error says why it cannot."""

import copy
import functools

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError
from stof_tvm.transformers import attention, set_mask
from tests.models.transformers_models import transformers_inputs, transformers_model
from tests.stof_tvm.transformers.conftest import LENGTH, by_eager, padding

close = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)
MASK = masks.strided(3) | masks.global_tokens([1])


def scores(mask, kept=None, length=LENGTH):
    """The additive mask of a causal model with a user's mask and padding: float32 (2, 1, length, length)."""
    keep = mask.dense(length) & torch.ones(length, length, dtype=torch.bool).tril()
    keep = keep.expand(2, 1, -1, -1) if kept is None else keep & kept.bool()[:, None, None]
    return torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("given", ["Mask", "tensor", "function"])
@torch.no_grad()
def test_it_holds_beside_the_models_own_mask(given, side, decoder, ids, sparse_calls):
    model, kept = decoder("Llama"), padding(side)
    mask = {"Mask": MASK, "tensor": MASK.dense(LENGTH), "function": lambda b, h, q, kv: (q - kv) % 3 == 0}[given]
    set_mask(model, mask)
    kept_pairs = masks.from_mask_mod(mask) if given == "function" else MASK
    expected = by_eager(decoder("Llama"), ids, attention_mask=scores(kept_pairs, kept))
    close(model(ids, attention_mask=kept)[0][kept.bool()], expected[kept.bool()])
    assert len(sparse_calls) == 2
    set_mask(model, None)
    close(model(ids)[0], by_eager(model, ids))


@torch.no_grad()
def test_a_tensor_that_is_written_to_is_read_again(decoder, ids):
    model, tensor = decoder("Llama"), MASK.dense(LENGTH)
    set_mask(model, tensor)
    before = model(ids)[0]
    tensor.fill_(True)
    close(model(ids)[0], by_eager(decoder("Llama"), ids))
    tensor.copy_(MASK.dense(LENGTH))
    close(model(ids)[0], before)


@torch.no_grad()
def test_masks_by_path_and_models_without_a_mask_of_their_own():
    model, inputs = transformers_model("bert", "stof"), transformers_inputs("bert", padded=False)
    set_mask(model, {"encoder.*": masks.causal(), "encoder.layer.0.attention": masks.sliding_window(2)})
    near = masks.sliding_window(2).dense(16).expand(2, 1, 16, 16)
    masked = model(**inputs)[0]
    set_mask(model, None)
    close(masked, model(inputs["input_ids"], attention_mask=near)[0])


@pytest.mark.parametrize("cache", [None, "static"])
@torch.no_grad()
def test_rows_are_positions_while_tokens_are_generated(cache, decoder, ids):
    model, mask = decoder("Llama"), masks.sliding_window(4, causal=True) | masks.global_tokens([0])
    set_mask(model, mask)
    tokens = model.generate(ids, max_new_tokens=8, do_sample=False, cache_implementation=cache, disable_compile=True)
    set_mask(model, None)
    model.set_attn_implementation("eager")
    expected = ids
    for length in range(LENGTH, 24):
        logits = model(expected, attention_mask=scores(mask, length=length), use_cache=False)[0]
        expected = torch.cat([expected, logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(tokens, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_rows_are_positions_in_the_second_part_of_a_prompt(cache, decoder, monkeypatch, sparse_calls):
    """The layers' cache is one of a window, so that the first key is not the first of the sequence."""
    from transformers import DynamicCache, StaticCache

    monkeypatch.setattr(attention, "SHORT", 4)
    model, ids = decoder("Mistral"), torch.randint(1, 64, (2, 24), generator=torch.Generator().manual_seed(1))
    mask = masks.strided(3)
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=32)
    set_mask(model, mask)
    parts = [model(part, past_key_values=past)[0] for part in ids.split(12, dim=1)]
    set_mask(model, None)
    both = mask & masks.sliding_window(4)
    close(torch.cat(parts, dim=1), by_eager(model, ids, attention_mask=scores(both, length=24)))
    assert len(sparse_calls) == 4


def test_it_holds_where_gradients_are_recorded(decoder, ids):
    model = decoder("Gemma2", sliding_window=32)
    set_mask(model, MASK)
    with pytest.warns(UserWarning, match="gradients are recorded"):
        actual = model(ids)[0]
    own = {name: scores(MASK) for name in ("full_attention", "sliding_attention")}
    close(actual.detach(), by_eager(decoder("Gemma2"), ids, attention_mask=own))


def test_wrong_uses(decoder, ids):
    model = decoder("Llama")
    with pytest.raises(
        MaskError, match=r"mask path 'encoder' matches no attention .* are: 'model.layers.0.self_attn', "
    ):
        set_mask(model, {"model.layers.1": MASK, "encoder": MASK})
    set_mask(model, MASK)  # the failed call gave nothing
    with pytest.raises(MaskError, match="Linear has no attention that dispatches by attn_implementation"):
        set_mask(torch.nn.Linear(2, 2), MASK)
    with pytest.raises(InputError, match="set_mask needs a model, got str"):
        set_mask("model", MASK)
    with pytest.raises(MaskError, match="mask must be a Mask, a bool tensor"):
        set_mask(model, 3)
    with torch.no_grad(), pytest.raises(MaskError, match="that set_mask gave to '\\*': a mask of shape .* broadcast"):
        set_mask(model, torch.ones(8, 8, dtype=torch.bool))
        model(ids)


def test_it_is_not_lost_to_another_implementation_nor_to_a_copy(decoder, ids):
    model = decoder("Llama")
    set_mask(model, MASK)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("sdpa")
    with pytest.raises(
        MaskError, match=r"attention 'model.layers.0.self_attn' runs by attn_implementation='sdpa', where"
    ):
        twin(ids)
    with pytest.raises(MaskError, match="runs by attn_implementation='sdpa'"):
        set_mask(twin, MASK)
    set_mask(twin, None)
    with torch.no_grad():
        close(twin(ids)[0], by_eager(decoder("Llama"), ids))
        close(model(ids)[0], by_eager(decoder("Llama"), ids, attention_mask=scores(MASK)))


@pytest.mark.slow  # torch.export and TorchDynamo
@torch.no_grad()
def test_it_is_not_lost_to_a_traced_graph(decoder, ids):
    model = decoder("Llama", use_cache=False)
    set_mask(model, MASK)
    with pytest.raises(MaskError, match="LlamaAttention has a mask of set_mask, which a traced graph would lose"):
        torch.export.export(model, (ids,), strict=False)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(MaskError, match="has a mask of set_mask, which a traced graph would lose"):
        compiled(ids)


@torch.no_grad()
def test_queries_whose_positions_are_unknown():
    model, inputs = transformers_model("t5", "stof"), transformers_inputs("t5", padded=True)
    set_mask(model, MASK)
    with pytest.raises(MaskError, match="T5Attention compares 8 queries with 16 keys, whose positions are not known"):
        model(**inputs)
    set_mask(model, {"encoder": masks.causal()})
    model(**inputs)


@torch.no_grad()
def test_build_says_so_in_the_same_words(decoder, ids):
    model = decoder("Llama", use_cache=False)
    set_mask(model, MASK)
    for verify in (True, False):
        with pytest.raises(MaskError) as raised:
            stof_tvm.build(model, "llvm", (ids,), verify=verify)
        assert str(raised.value).startswith("LlamaAttention has a mask of set_mask, which a traced graph would lose")
