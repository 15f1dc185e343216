"""States on a GPU: kernels and CUDA graphs that write caches in place, engines that share them, generate()."""

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm import masks
from stof_tvm.dynamo.backend import stof
from stof_tvm.generation import parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 8, 2, 1024, 64
WIDTH = HEADS * SIZE


class Decoder(nn.Module):
    """One attention over a cache that grows by the tokens of each call."""

    def __init__(self):
        super().__init__()
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * KV_HEADS * SIZE)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, KV_HEADS, LENGTH, SIZE))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.given = None  # a mask by the rows of positions, as PyTorch applies it

    def forward(self, x):
        tokens = x.shape[1]
        at = torch.arange(tokens, device=x.device) + self.position
        q = self.q(x).view(BATCH, tokens, HEADS, SIZE).transpose(1, 2)
        k, v = self.kv(x).view(BATCH, tokens, 2, KV_HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        self.keys.index_copy_(2, at, k)
        self.values[:, :, at] = v
        self.position.add_(tokens)
        keep = torch.arange(LENGTH, device=x.device)[None] <= at[:, None]
        keep = keep if self.given is None else keep & self.given[at]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=keep, enable_gqa=True)
        return y.transpose(1, 2).reshape(BATCH, tokens, WIDTH)


def tokens(count=1):
    return torch.randn(BATCH, count, WIDTH, device="cuda", dtype=torch.float16)


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder().half().cuda().eval()


@torch.no_grad()
def test_replays_write_a_cache_in_place(decoder):
    prompt, step = (stof_tvm.build(decoder, None, (tokens(count),)) for count in (100, 1))
    step.share_state(prompt)
    model = Decoder().half().cuda().eval()
    model.load_state_dict(decoder.state_dict())
    places = {name: x.data_ptr() for name, x in step.state.items()}
    for count in (100, *[1] * 8, 100, 1):
        x = tokens(count)
        out = prompt(x) if count > 1 else step(x)
        assert (out - model(x)).abs().max() < 1e-2
    assert step.report().execution == "replays of a CUDA graph"
    assert {name: x.data_ptr() for name, x in prompt.state.items()} == places
    for name, x in step.state.items():
        torch.testing.assert_close(x, getattr(model, name), atol=1e-2, rtol=1e-2)
    assert not decoder.keys.any()


@torch.no_grad()
@pytest.mark.parametrize("count", [1, 4])
def test_a_given_mask_decodes(decoder, count):
    """The lists of the row-wise kernel are computed from the positions in every replay."""
    mask = masks.a_shape(4, 100)
    engine = stof_tvm.build(decoder, None, (tokens(count),), mask)
    assert engine.report().verification.result == "passed"
    model = Decoder().half().cuda().eval()
    model.load_state_dict(decoder.state_dict())
    model.given = mask.dense(LENGTH).cuda()
    for step in range(300 // count):
        x = tokens(count)
        assert (engine(x) - model(x)).abs().max() < 1e-2, step
    engine.state["position"].fill_(LENGTH)
    assert engine(tokens(count)).isnan().all()


@torch.no_grad()
def test_streams_take_turns(decoder):
    """Two engines over one cache, called on two streams: no call begins before the other's has ended."""
    prompt, step = (stof_tvm.build(decoder, None, (tokens(count),)) for count in (100, 1))
    step.share_state(prompt)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    calls = [(prompt, tokens(100)), *((step, tokens()) for _ in range(4))]
    expected = [engine(x) for engine, x in calls]
    step.reset_state()
    torch.cuda.synchronize()
    found = []
    for number, (engine, x) in enumerate(calls):
        with torch.cuda.stream(second if number % 2 else first):
            torch.cuda._sleep(20_000_000)
            found.append(engine(x))
    torch.cuda.synchronize()
    for out, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(out, wanted, atol=0, rtol=0)


class Update(nn.Module):
    def forward(self, cache, at, rows):
        cache.index_copy_(0, at, rows)
        return cache.sum(-1)


@torch.no_grad()
def test_a_callers_caches_take_turns():
    """A graph writes into the tensor that it was captured with; another tensor is another graph."""
    at, rows = torch.tensor([1, 40], device="cuda"), torch.randn(2, 64, device="cuda", dtype=torch.float16)
    caches = [torch.randn(64, 64, device="cuda", dtype=torch.float16) for _ in range(2)]
    caches.append(torch.randn(64, 128, device="cuda", dtype=torch.float16)[:, ::2])
    expected = [cache.clone() for cache in caches]
    engine = stof_tvm.build(Update(), None, (caches[0].clone(), at, rows))
    for number in (0, 1, 1, 0, 2, 0):
        rows = torch.randn_like(rows)
        expected[number][at] = rows
        sums = engine(caches[number], at, rows)
        torch.testing.assert_close(sums, expected[number].sum(-1), atol=5e-2, rtol=1e-2)
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, wanted, atol=0, rtol=0)


@torch.no_grad()
def test_generate_with_a_static_cache():
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, pad_token_id=0))
    model = model.cuda().eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(1, 512, (2, 20), device="cuda")
    settings = dict(max_new_tokens=64, do_sample=False, cache_implementation="static")
    expected = model.generate(ids, **settings, disable_compile=True)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend=stof)
    assert torch.equal(model.generate(ids, **settings), expected)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 2])
def test_texts_of_engines_are_those_of_transformers(batch):
    """`stof_tvm.generation`: a window and a causal layer, tokens by replays of a captured graph, caches in bfloat16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=16, sliding_window=40, tie_word_embeddings=False, eos_token_id=None)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, initializer_range=2.0)).eval().cuda()
    ids = torch.randint(1, 96, (batch, 70), device="cuda")
    padding = torch.ones_like(ids)
    padding[0, : 9 * (batch - 1)] = 0
    generator = stof_tvm.generation.engines(model, max_length=512, batch=batch, prompt=128)
    options = dict(max_new_tokens=300, do_sample=False)
    assert torch.equal(
        generator.generate(ids, padding, **options), model.generate(ids, attention_mask=padding, **options)
    )
    assert "replays" in str(generator._step.report().execution)
    half = stof_tvm.generation.engines(model.bfloat16(), max_length=512, batch=batch, prompt=128)  # compares logits
    assert half.generate(ids, padding, max_new_tokens=8).shape == (batch, 78)


@torch.no_grad()
def test_prompts_in_parts_are_those_of_transformers(monkeypatch):
    """Two of three sequences at a time; the second text is begun before its options are read, on another stream."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=16, eos_token_id=None, pad_token_id=0, initializer_range=0.3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().cuda()
    monkeypatch.setattr(parts, "MOST_TOKENS", 2 * 128)
    generator = stof_tvm.generation.engines(model, max_length=256, batch=3, prompt=128)
    ids = torch.randint(1, 96, (3, 100), device="cuda")
    padding = (torch.arange(100) >= torch.tensor([[0], [31], [64]])).long().cuda()
    options = dict(max_new_tokens=64, do_sample=False)
    for text in (ids, ids.flip(0)):
        expected = model.generate(text, attention_mask=padding, **options)
        assert torch.equal(generator.generate(text, padding, **options), expected)


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_after_prompts_of_which_a_window_is_kept(monkeypatch, batch):
    """Layers compute the rows that windows lead to, and keep the last window's; a batch's prompts are in parts."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=16, eos_token_id=None, pad_token_id=0, initializer_range=0.3)
    own = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, sliding_window=40)).eval().cuda()
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval().cuda()
    model.load_state_dict(own.state_dict())
    monkeypatch.setattr(parts, "MOST_TOKENS", 2 * 512)
    window = masks.sliding_window(39, causal=True)
    generator = stof_tvm.generation.engines(model, max_length=640, batch=batch, prompt=[256, 512], mask=window)
    rows = [site.shape.q_len for site in generator._prompts[512].report().rewritten]
    assert rows == [79, 40, 1]
    for length in (257, 300, 512):
        ids = torch.randint(1, 96, (batch, length), device="cuda")
        options = dict(max_new_tokens=64, do_sample=False)
        assert torch.equal(generator.generate(ids, **options), own.generate(ids, **options))
