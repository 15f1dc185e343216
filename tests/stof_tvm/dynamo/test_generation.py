"""transformers' generate() with a static cache and `torch.compile(model.forward, backend="stof")`."""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402

from stof_tvm import masks  # noqa: E402
from stof_tvm.dynamo import graph  # noqa: E402
from tests.models.quick_llvm import QUICK_LLVM  # noqa: E402

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=128, pad_token_id=0)
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}  # LLaMA has two, and Gemma one of each kind
GPT2 = GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, n_positions=128)
PROMPT, STEPS, WINDOW = 9, 12, 12
MODELS = {
    # (model, engines: one for the prompt, one for tokens; with windows one more, for tokens when a cache is full)
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), 2),
    "gpt2": (lambda: GPT2LMHeadModel(GPT2), 2),
    "qwen3": (lambda: Qwen3ForCausalLM(Qwen3Config(**ONE_LAYER)), 2),
    "gemma2": (lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=WINDOW)), 3),
}


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def engines(monkeypatch):
    built = []

    def build(*args, **kwargs):
        built.append(actual(*args, **kwargs))
        return built[-1]

    actual = graph.build
    monkeypatch.setattr(graph, "build", build)
    return built


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name, engines):
    """Two prompts, one padded on the left; a cache is written in place, and no length is compiled twice."""
    make, count = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    ids = torch.randint(2, 94, (2, PROMPT))
    padding = torch.ones_like(ids)
    padding[0, :3] = 0
    generate = dict(attention_mask=padding, max_new_tokens=STEPS, do_sample=False, cache_implementation="static")
    model.generation_config.eos_token_id = None
    expected = model.generate(ids, **generate, disable_compile=True)
    model.forward = torch.compile(model.forward, backend="stof", options={"target": QUICK_LLVM})
    assert torch.equal(model.generate(ids, **generate), expected)
    assert len(engines) == count
    caches = [state for state in engines[1].signature.states if len(state.shape) == 4]
    assert len(caches) == 2 * model.config.num_hidden_layers and all(state.result is None for state in caches)
    # Another prompt may need one more engine, for a prompt whose cache exists already; no token does.
    again = dict(generate, attention_mask=torch.ones_like(ids))
    found = model.generate(ids.flip(1), **again)
    assert len(engines) <= count + 1
    del model.forward
    assert torch.equal(found, model.generate(ids.flip(1), **again, disable_compile=True))


class Densely:
    """Attention of transformers with a mask applied densely: a token's row is its slot of the cache."""

    def __init__(self, mask, length):
        self.keep, self.seen = mask.dense(length), {}

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_):
        first, count = self.seen.get(module.layer_idx, 0), query.shape[2]
        self.seen[module.layer_idx] = first + count
        keep = self.keep[first : first + count, : key.shape[2]] & attention_mask
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=keep, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None


@pytest.mark.slow
@torch.no_grad()
def test_a_given_mask_decodes(engines):
    """One prompt is padded on the left: its rows and columns are slots of the cache, as all are."""
    mask = masks.a_shape(3, 4)  # a sink and a window
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ids = torch.randint(2, 94, (2, PROMPT))
    padding = torch.ones_like(ids)
    padding[0, :2] = 0
    generate = dict(attention_mask=padding, max_new_tokens=STEPS, do_sample=False, cache_implementation="static")
    model.generation_config.eos_token_id = None
    plain = model.generate(ids, **generate, disable_compile=True)
    AttentionInterface.register("densely", Densely(mask, PROMPT + STEPS))
    AttentionMaskInterface.register("densely", sdpa_mask)
    model.set_attn_implementation("densely")
    expected = model.generate(ids, **generate, disable_compile=True)
    assert not torch.equal(expected, plain)
    model.set_attn_implementation("sdpa")
    model.forward = torch.compile(model.forward, backend="stof", options={"target": QUICK_LLVM, "mask": mask})
    for _ in range(2):
        assert torch.equal(model.generate(ids, **generate), expected)
    assert len(engines) == 2
    assert [site.shape.has_positions for engine in engines for site in engine.report().sites] == [False] * 2 + [
        True
    ] * 2
