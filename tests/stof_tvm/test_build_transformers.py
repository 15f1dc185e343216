"""`build` of whole transformers models: outputs, output objects and the number of rewritten attentions."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.transformers_models import transformers_inputs, transformers_model

# Attentions in the test models of one layer; T5 has an encoder, a decoder and its cross attention.
SITES = {"bert": 1, "gpt2": 1, "llama": 1, "t5": 3, "vit": 1}
GEMMA = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2)
GEMMA |= dict(num_hidden_layers=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, use_cache=False)


@pytest.mark.slow  # compiles seven models
@pytest.mark.parametrize(
    "family, attention", [*zip(SITES, ("sdpa", "eager", "sdpa", "sdpa", "eager")), ("bert", "eager"), ("t5", "eager")]
)
@torch.no_grad()
def test_every_attention_runs_on_a_sparse_kernel(family, attention):
    model = transformers_model(family, attention)
    inputs = transformers_inputs(family, padded=True)
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, strict=True)
    expected, actual = model(**inputs), engine(**inputs)
    assert type(actual) is type(expected) and list(actual) == list(expected)
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], atol=2e-5, rtol=1e-4)  # and of one dtype
    sites = engine.report().sites
    assert len(sites) == SITES[family] and all(site.rewritten for site in sites)


@pytest.mark.parametrize("given", [None, "window"])
@torch.no_grad()
def test_gemma_2_caps_its_scores(given):
    """Layers with a sliding window and without one, by turns; small caps, so that they matter."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(**GEMMA, attn_logit_softcapping=0.25, attn_implementation="eager")
    model = Gemma2ForCausalLM(config).eval()
    for name, x in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            x *= 20
    ids = torch.randint(0, 64, (2, 24))
    mask = None if given is None else masks.sliding_window(4)
    engine = stof_tvm.build(model, QUICK_LLVM, (ids,), mask, strict=True)
    sites = engine.report().sites
    assert len(sites) == 2 and all("scores capped at 0.25 by tanh" in site.notes for site in sites)
    i, j = torch.arange(24)[:, None], torch.arange(24)
    keep = (j <= i) & ((i - j).abs() <= 4 if given else True)
    bias = torch.zeros(1, 1, 24, 24).masked_fill(~keep, -torch.inf)
    near = bias.masked_fill(i - j >= 8, -torch.inf)
    expected = model(ids, attention_mask={"full_attention": bias, "sliding_attention": near}).logits
    torch.testing.assert_close(engine(ids).logits, expected, atol=2e-5, rtol=1e-4)
    config.attn_logit_softcapping = None
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (
        model(ids, attention_mask={"full_attention": bias, "sliding_attention": near}).logits - expected
    ).abs().max() > 1e-3
