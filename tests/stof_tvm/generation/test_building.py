"""Engines of causal language models: the tokens are transformers', caches are in place, other models are refused."""

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from stof_tvm.errors import InputError, MaskError, UnsupportedError, VerificationError
from stof_tvm.generation import engines
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import LENGTH, MODELS, SIZES, generator, small, tokens

PADDED = 7  # tokens on the left of the first of two prompts


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, two):
    """One prompt is padded on the left; windows of 12 positions lie within the prompt, and pass beyond it."""
    ids = tokens(2, 27)
    padding = torch.ones_like(ids)
    padding[0, :PADDED] = 0
    expected = small(name).generate(ids, attention_mask=padding, max_new_tokens=60, do_sample=False)
    assert len(set(expected[0, 27:].tolist())) > 10  # not one token again and again
    found = (two if name == "llama" else generator(name)).generate(ids, padding, max_new_tokens=60, do_sample=False)
    assert torch.equal(found, expected)


def test_caches_are_written_in_place(two):
    for engine in (two._step, two._prompt_engine(16)):
        states = {state.name: state.result for state in engine.signature.states}
        assert len(states) == 5 and all(states[name] is None for name in states if name != "positions")
        assert not engine.report().notes and engine.report().verification.result == "passed"
    assert two._step.state["keys_1"] is two._prompt_engine(32).state["keys_1"]


def test_prompts_are_causal_and_of_one_product_with_the_vocabulary(two):
    report = str(two._prompt_engine(32).report())
    assert report.count("causal()") == 1 and "computed for 1 of its 32 queries" in report
    assert two._prompt_engine(32).signature.outputs[0].shape == (2, SIZES["vocab_size"])


class Bidirectional(LlamaForCausalLM):
    """Each token sees those after it."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = False


def test_a_model_that_reads_what_follows_is_refused():
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, is_causal=False)
    with pytest.raises(VerificationError, match="LlamaForCausalLM computes other logits with padding behind a prompt"):
        engines(LlamaForCausalLM(config).eval(), max_length=32, target=QUICK_LLVM, verify=False)
    del config.is_causal
    with pytest.raises(VerificationError, match="Bidirectional computes other logits with padding behind a prompt"):
        engines(Bidirectional(config).eval(), max_length=32, target=QUICK_LLVM, verify=False)


@pytest.mark.parametrize(
    "model, error",
    [
        (lambda: torch.nn.Linear(2, 2), "takes a causal language model of transformers, got a Linear"),
        (lambda: T5ForConditionalGeneration(T5Config(d_model=8, num_layers=1)), "is an encoder with a decoder"),
        (lambda: LlamaModel(LlamaConfig(**SIZES)), "LlamaModel gives no logits of tokens"),
        (lambda: BertModel(BertConfig(hidden_size=8, num_attention_heads=1)), "BertModel gives no logits of tokens"),
        (
            lambda: MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1)),
            "does not keep keys and values of each token only: a layer has a LinearAttentionLayer",
        ),
    ],
    ids=["Linear", "T5", "LlamaModel", "Bert", "Mamba"],
)
def test_other_models_are_refused(model, error):
    with pytest.raises(UnsupportedError, match=error):
        engines(model(), max_length=32, target=QUICK_LLVM)


def test_a_model_that_knows_one_position_only_is_refused():
    """OPT makes a mask of as many ones as there are tokens, a number."""
    sizes = dict(vocab_size=8, hidden_size=8, ffn_dim=8, num_hidden_layers=1, num_attention_heads=1)
    model = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=8))
    with pytest.raises(UnsupportedError, match="OPTForCausalLM does not compute tokens after one another.*TypeError"):
        engines(model, max_length=32, batch=2, target=QUICK_LLVM)


@pytest.mark.parametrize(
    "arguments, error",
    [
        (dict(max_length=289), "max_length=289 is more than the model's 288 positions"),
        (dict(max_length=1), "max_length must be a whole number from 2 on, got 1"),
        (dict(max_length=32, batch=0), "batch must be a whole number from 1 on, got 0"),
        (dict(max_length=32, prompt=[16, 64]), r"prompt must have lengths from 2 to max_length=32, got \[16, 64\]"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(arguments, error):
    with pytest.raises(InputError, match=error):
        engines(small("llama"), target=QUICK_LLVM, **arguments)


@pytest.mark.parametrize("name", ["promt", "dynamic_shapes", "buckets", "without_padding", "example_inputs"])
def test_options_that_build_has_not_or_that_engines_gives_it_are_refused(name):
    with pytest.raises(TypeError, match=rf"engines\(\) got an unexpected keyword argument '{name}'"):
        engines(small("llama"), max_length=32, target=QUICK_LLVM, **{name: [16]})


def test_other_attention_is_refused():
    model = copy.deepcopy(small("llama"))
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(UnsupportedError, match="has attn_implementation='flex_attention': load it with 'sdpa' or"):
        engines(model, max_length=32, target=QUICK_LLVM)


def test_the_model_stays_as_it_was(two):
    model = copy.deepcopy(small("llama")).train()
    with pytest.raises(MaskError):  # before anything is compiled
        engines(model, max_length=32, target=QUICK_LLVM, mask=torch.ones(3, 3, dtype=torch.bool))
    assert model.training and model.lm_head.training
    assert model.config._attn_implementation == "sdpa" and model.config.use_cache
    assert not model.lm_head._forward_pre_hooks
    ids = tokens(1, 5)
    assert torch.equal(model.eval()(ids).logits, small("llama")(ids).logits)


@pytest.mark.slow
def test_engines_for_gpus_are_built_without_one(tmp_path):
    """Their sources are C++, where there is nvcc to try it; they hold the weight of gates and values once."""
    model = copy.deepcopy(small("qwen3")).bfloat16()
    found = engines(model, max_length=LENGTH, prompt=[32], target="cuda -arch=sm_90a")
    for engine in (found._step, found._prompt_engine(32)):
        assert [state.name for state in engine.signature.states if state.result is not None] == ["positions"]
        assert "__global__" in engine.cuda_source()
        assert [row.kernel for row in engine.report().segments if "silu" in row.operators] == ["gemm"]
    wide = 2 * SIZES["intermediate_size"], SIZES["hidden_size"]  # the embeddings have this shape, too
    of_step, of_prompt = (
        {id(x) for x in engine._weights.tensors if x.shape == wide}
        for engine in (found._step, found._prompt_engine(32))
    )
    assert of_step == of_prompt and len(of_step) == 3
    found._step.save(tmp_path / "step.stof")
    (site,) = found._step.report().rewritten
    assert site.shape.has_positions and "causal()" in str(site)


def rotary(kind, original=32, **more):
    """A LLaMA whose rotary frequencies may change after `original` tokens."""
    torch.manual_seed(0)
    half = SIZES["hidden_size"] // SIZES["num_attention_heads"] // 2
    factors = {"short_factor": [1.0] * half, "long_factor": [4.0] * half} if kind == "longrope" else {"factor": 4.0}
    table = {"rope_type": kind, "rope_theta": 1e4, "original_max_position_embeddings": original, **factors, **more}
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 1}, rope_parameters=table)).eval()


@pytest.mark.parametrize(
    "kind, told", [("longrope", "'longrope', .* max_length=33 must be at most 32"), ("dynamic", "'dynamic'")]
)
def test_rotary_frequencies_that_change_with_the_length_are_refused(kind, told):
    with pytest.raises(UnsupportedError, match=told):
        engines(rotary(kind), max_length=33, target=QUICK_LLVM)


def test_rotary_frequencies_that_change_after_the_last_token():
    model = rotary("longrope")
    ids = tokens(1, 20)
    expected = model.generate(ids, max_new_tokens=12, do_sample=False)
    found = engines(model, max_length=32, prompt=[24], target=QUICK_LLVM).generate(
        ids, max_new_tokens=12, do_sample=False
    )
    assert torch.equal(found, expected)


class Counting(LlamaForCausalLM):
    """Logits depend on how many calls were before."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, *args, **kwargs):
        result = super().forward(*args, **kwargs)
        self.calls.add_(1)
        result.logits = result.logits + self.calls * 1e-7
        return result


def test_a_model_that_keeps_something_from_call_to_call_is_refused():
    torch.manual_seed(0)
    model = Counting(LlamaConfig(**{**SIZES, "num_hidden_layers": 1})).eval()
    with pytest.raises(UnsupportedError, match="Counting updates its buffer 'calls' in forward"):
        engines(model, max_length=32, target=QUICK_LLVM, verify=False)
