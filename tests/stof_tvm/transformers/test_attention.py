"""Whole models with attention "stof" compute what they compute with "eager", and say where they cannot be sparse."""

import functools
import warnings

import pytest
import torch

import stof_tvm
from stof_tvm.errors import UnsupportedError
from stof_tvm.transformers import attention
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.transformers_models import transformers_inputs, transformers_model
from tests.stof_tvm.transformers.conftest import by_eager, padding

close = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=1e-4)
DECODERS = ("Llama", "Mistral", "Gemma2", "Qwen3", "GPT2", "GptOss")


@pytest.fixture(autouse=True)
def no_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="attention .* densely")
        yield


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_decoders(family, side, decoder, ids, sparse_calls):
    model, kept = decoder(family), padding(side)
    expected, actual = by_eager(model, ids, attention_mask=kept), model(ids, attention_mask=kept)[0]
    close(actual[kept.bool()], expected[kept.bool()])
    assert len(sparse_calls) == 2


@pytest.mark.parametrize("side", [None, "left", "right"])
@torch.no_grad()
def test_bert_sees_both_sides_but_no_padding(side, ids, sparse_calls):
    model, kept = transformers_model("bert", "stof"), padding(side)
    close(model(ids, kept)[0][kept.bool()], by_eager(model, ids, kept)[kept.bool()])
    assert len(sparse_calls) == 1 and (sparse_calls[0] is None) == (side is None)


@torch.no_grad()
def test_vit(sparse_calls):
    model, inputs = transformers_model("vit", "stof"), transformers_inputs("vit", padded=False)
    close(model(**inputs)[0], by_eager(model, **inputs))
    assert sparse_calls == [None]


@torch.no_grad()
def test_t5_has_a_position_bias_and_a_cross_attention(sparse_calls):
    model, inputs = transformers_model("t5", "stof"), transformers_inputs("t5", padded=True)
    close(model(**inputs)[0], by_eager(model, **inputs))
    assert len(sparse_calls) == 2  # the cross attention has fewer queries than keys, as a step of decoding has


@torch.no_grad()
def test_packed_sequences_do_not_see_one_another(decoder, ids, sparse_calls):
    model = decoder("Mistral", use_cache=False)
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    packed = model(ids[:1], position_ids=positions)[0]
    assert len(sparse_calls) == 2
    close(packed[:, :9], by_eager(model, ids[:1, :9]))
    close(packed[:, 9:], by_eager(model, ids[:1, 9:]))


@torch.no_grad()
def test_masks_of_four_dimensions_are_taken_as_they_are(decoder, ids):
    model = decoder("Llama")
    keep = (torch.rand(2, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < 0.5) | torch.eye(16, dtype=bool)
    scores = torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = by_eager(model, ids, attention_mask=scores)
    close(model(ids, attention_mask=keep)[0], expected)
    close(model(ids, attention_mask=scores)[0], expected)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["Llama", "GPT2", "Mistral"])
def test_generated_tokens(family, cache, decoder, ids, sparse_calls):
    """Mistral's window is smaller than the prompt.  The second prompt is padded."""
    model, kept = decoder(family), padding("left")
    options = dict(attention_mask=kept, max_new_tokens=8, do_sample=False, pad_token_id=0)
    actual = model.generate(ids, **options, cache_implementation=cache, disable_compile=True)
    # Of the prompt alone.  A fixed cache, unless it is one of a window, has more keys, which makes it a step.
    assert len(sparse_calls) == (0 if cache and family != "Mistral" else 2)
    model.set_attn_implementation("eager")
    assert torch.equal(actual, model.generate(ids, **options)) and actual.shape == (2, 24)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@torch.no_grad()
def test_a_long_prompt_in_two_parts(cache, decoder, monkeypatch, sparse_calls):
    from transformers import DynamicCache, StaticCache

    monkeypatch.setattr(attention, "SHORT", 4)
    model = decoder("Mistral")
    ids = torch.randint(1, 64, (1, 24), generator=torch.Generator().manual_seed(1))
    past = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=32)
    parts = [model(part, past_key_values=past)[0] for part in ids.split(12, dim=1)]
    close(torch.cat(parts, dim=1), by_eager(model, ids))
    assert len(sparse_calls) == 4


def told(model, reason: str, *args, **kwargs):
    """The result of a call that warns once for all layers, by which reason."""
    with pytest.warns(UserWarning, match=f"attention .*Attention runs on PyTorch's .*: {reason}") as found:
        result = model(*args, **kwargs)[0]
    assert len([each for each in found if "densely" in str(each.message)]) == 1
    model(*args, **kwargs)  # without another warning, which would be an error
    return result


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
def test_gradients_are_pytorchs_and_told(family, decoder, ids):
    model = decoder(family)
    told(model, "gradients are recorded", ids).sum().backward()  # of the first of two calls
    grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    model.set_attn_implementation("eager")
    model(ids)[0].sum().backward()
    expected = [x.grad for x in model.parameters() if x.grad is not None]
    assert expected
    for x, y in zip(grads, expected, strict=True):
        assert (x - y).norm() <= 1e-3 * y.norm()


@torch.no_grad()
def test_dropout_is_pytorchs_and_told(decoder, ids):
    model = decoder("Llama", attention_dropout=0.5).train()
    told(model, "it drops weights with probability 0.5", ids)


@torch.no_grad()
def test_dtypes_and_heads_that_no_kernel_has_are_pytorchs_and_told(decoder, ids):
    model = decoder("Gemma2").double()
    close(told(model, "its dtype is torch.float64", ids), by_eager(model, ids))
    model = decoder("Llama", head_dim=264)
    close(told(model, "head_dim=264 exceeds", ids), by_eager(model, ids))


def test_sinks_of_another_form_are_refused():
    x = torch.zeros(1, 1, 4, 8)
    with pytest.raises(
        UnsupportedError, match="Identity passes sinks to its attention: use attn_implementation='eager'"
    ):
        attention.stof_attention(torch.nn.Identity(), x, x, x, None, sinks=x)


@pytest.mark.slow  # an engine each
@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
@torch.no_grad()
def test_what_is_built_or_exported_is_rewritten(family, decoder, ids, sparse_calls):
    model, kept = decoder(family, num_hidden_layers=1), padding("right")
    engine = stof_tvm.build(model, QUICK_LLVM, {"input_ids": ids, "attention_mask": kept}, strict=True)
    assert not sparse_calls and len(engine.report().sites) == 1
    close(engine(input_ids=ids, attention_mask=kept)[0][kept.bool()], by_eager(model, ids, kept)[kept.bool()])


@torch.no_grad()
def test_torch_compile_of_a_model_and_of_its_layers(decoder, ids, sparse_calls):
    model = decoder("Llama", use_cache=False)
    expected = {side: by_eager(model, ids, padding(side)) for side in (None, "right")}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for side, logits in expected.items():
        close(compiled(ids, padding(side))[0][padding(side).bool()], logits[padding(side).bool()])
    assert not sparse_calls
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for side, logits in expected.items():
        close(model(ids, padding(side))[0][padding(side).bool()], logits[padding(side).bool()])


def test_a_pipeline_of_prompts_of_different_lengths(decoder):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(64)}, unk_token="w1"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", padding_side="left")
    model, texts = decoder("Llama"), ["w3 w4 w5 w6 w7", "w8 w9", "w10 w11 w12"]
    told = []
    for attention_name in ("stof", "eager"):
        model.set_attn_implementation(attention_name)
        generate = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu", batch_size=3)
        told.append(generate(texts, max_new_tokens=4, do_sample=False))
    assert told[0] == told[1] and len(told[0]) == 3


@torch.no_grad()
def test_weights_that_are_asked_for_are_told_to_be_missing(decoder, ids):
    """transformers' "sdpa" gives none either, and logs it."""
    model = decoder("Llama")
    with pytest.warns(UserWarning, match="LlamaAttention returns no weights for output_attentions=True.*'eager'"):
        out = model(ids, output_attentions=True)
    assert out.attentions == () and out.logits.isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(ids, output_attentions=True)  # told already
        decoder("Llama")(ids)  # not asked for
    model.set_attn_implementation("eager")
    assert len(model(ids, output_attentions=True).attentions) == 2
