"""Prompts of models with windows: what the last token depends on is computed, and what later tokens read is kept."""

import functools

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from stof_tvm import masks
from stof_tvm.generation import engines, parts
from stof_tvm.generation.masks_of_positions import windows_of_layers
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.generation.conftest import GEMMA, SIZES, WINDOW, small, tokens

LENGTH, SHORT, LONG, LAYERS = 96, 48, 64, 3  # prompts padded to LONG have 49 tokens or more
DEEP = {**SIZES, "num_hidden_layers": LAYERS}
MASK = masks.sliding_window(WINDOW - 1, causal=True)
# Of the last token, and of a window more in each layer before.  A layer's keys reach a window before its queries.
QUERIES = [1 + (WINDOW - 1) * n for n in (2, 1, 0)]


@functools.cache
def mistral():
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**DEEP, sliding_window=WINDOW)).eval()


@functools.cache
def llama():
    """The same without a window."""
    found = LlamaForCausalLM(LlamaConfig(**DEEP)).eval()
    found.load_state_dict(mistral().state_dict())
    return found


@functools.cache
def gemma():
    """Every second layer has a window, and the last has none."""
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**{**GEMMA, "num_hidden_layers": 4})).eval()


def made(model, mask=None, **sizes):
    return engines(model, **{"max_length": LENGTH, "prompt": (SHORT, LONG), **sizes}, target=QUICK_LLVM, mask=mask)


@pytest.fixture(scope="module")
def masked():
    return made(llama(), MASK)


def lengths(found, room: int) -> list[tuple[int, int]]:
    """(queries, keys) of the attentions of the engine for prompts of `room` tokens."""
    return [(site.shape.q_len, site.shape.kv_len) for site in found._prompt_engine(room).report().rewritten]


def check(found, model, count: int, batch: int = 1, seed: int = 0) -> None:
    """The tokens after a prompt, up to the last position, are those of transformers."""
    ids = tokens(batch, count, seed=seed)
    options = dict(max_new_tokens=LENGTH - count, do_sample=False)
    assert torch.equal(found.generate(ids, **options), model.generate(ids, **options))


def are_narrowed(found, kept: int) -> None:
    """Check the rows of prompts of both lengths, where `kept` keys and values of each layer are kept."""
    whole = lengths(found, SHORT)
    assert [pair[0] for pair in whole[:-1]] == [SHORT] * (LAYERS - 1) and {keys for _, keys in whole} == {SHORT}
    queries = [pair[0] for pair in lengths(found, LONG)]
    assert queries == QUERIES
    assert [keys for _, keys in lengths(found, LONG)] == [n + kept - 1 for n in queries]


def test_only_what_the_last_token_depends_on_is_computed(masked):
    are_narrowed(masked, WINDOW)
    sites = masked._prompt_engine(LONG).report().rewritten
    assert [any("of its 64 queries" in note for note in site.notes) for site in sites] == [True] * LAYERS
    for room in (SHORT, LONG):
        assert masked._prompt_engine(room).report().verification.result == "passed"


@pytest.mark.parametrize("count", [49, 57, 64, 48, 30])
def test_tokens_are_those_of_transformers(masked, count):
    """Each begins in a cache that another one filled."""
    check(masked, mistral(), count, seed=count)


def test_tokens_after_one_long_prompt_and_another(masked):
    """The second one's first keys are not written: there are those of the first one, which nothing may read."""
    for seed, count in ((1, 64), (2, 50), (3, 49), (4, 60)):
        check(masked, mistral(), count, seed=seed)


@torch.no_grad()
def test_only_keys_within_the_window_are_kept(masked):
    """What stands before is not read: NaN there changes nothing."""
    ids, count = tokens(1, 57, seed=5), 57
    masked.prompt(ids)
    state, room = masked._step.state, slice(count - WINDOW, count)
    with torch.no_grad():
        cache = mistral()(ids, use_cache=True).past_key_values
    for n in range(LAYERS):
        expected = cache.layers[n].keys[:, :, 1 - WINDOW :]
        torch.testing.assert_close(state[f"keys_{n}"][:, :, room][:, :, 1:], expected, atol=1e-4, rtol=1e-4)
        for name in ("keys", "values"):
            state[f"{name}_{n}"][:, :, : count - WINDOW] = float("nan")
    token = tokens(1, 1)
    expected = mistral()(torch.cat([ids, token], 1)).logits[:, -1]
    torch.testing.assert_close(masked.step(token), expected, atol=1e-4, rtol=1e-4)


def test_a_model_with_a_window_of_its_own():
    found = made(mistral())
    are_narrowed(found, WINDOW)
    for count in (49, 64, 57, 48, 30):
        check(found, mistral(), count, seed=count)


@pytest.mark.slow
def test_several_sequences_at_one_position():
    """With a mask all prompts of a batch have one length."""
    found = made(llama(), MASK, batch=2)
    are_narrowed(found, WINDOW)
    for count in (49, 64, 57, 48):
        check(found, mistral(), count, batch=2, seed=count)


@pytest.mark.slow
def test_prompts_in_parts(monkeypatch):
    monkeypatch.setattr(parts, "MOST_TOKENS", 2 * LONG)
    found = made(llama(), MASK, batch=3)
    assert found._prompt_engine(LONG).signature.inputs[0].shape == (2, LONG)
    assert found.sizes.part_of(SHORT) == 2
    are_narrowed(found, WINDOW)
    engine = found._prompt_engine(LONG)
    assert all(state.result is None for state in engine.signature.states if state.name != "positions")
    for count in (49, 64, 57, 30):
        check(found, mistral(), count, batch=3, seed=count)


@pytest.mark.slow
def test_sequences_at_positions_of_their_own_have_all_rows():
    found, ids = made(mistral(), batch=2), tokens(2, 57)
    assert [pair[0] for pair in lengths(found, LONG)][:-1] == [LONG] * (LAYERS - 1)
    padding = torch.ones_like(ids)
    padding[0, :20] = 0
    options = dict(attention_mask=padding, max_new_tokens=LENGTH - 57, do_sample=False)
    assert torch.equal(found.generate(ids, **options), mistral().generate(ids, **options))


@pytest.mark.slow
def test_layers_before_one_that_reads_all_keys_are_whole():
    """Layers 1 and 3 read all: only the last layer, which does, is computed for the last token alone."""
    found = made(gemma())
    assert found._engines.copied_model.windows == (WINDOW, None, WINDOW, None)
    assert lengths(found, LONG) == [(LONG, LONG)] * 3 + [(1, LONG)]
    for count in (49, 64, 57, 48):
        check(found, gemma(), count, seed=count)


def test_windows_of_layers():
    paths = [f"model.layers.{n}.self_attn" for n in range(2)]
    sizes, llama = (1, 4, LENGTH, LENGTH), small("llama")
    window = masks.sliding_window(5, causal=True)
    of = lambda masks, paths=paths, layers=2: windows_of_layers(llama, paths, masks, sizes, layers)
    assert of(window) == [6, 6]
    assert of(masks.sliding_window(5) & masks.sliding_window(3)) == [4, 4]
    assert of(masks.per_head([window, masks.sliding_window(2), window, window])) == [6, 6]
    assert of({"model.layers.1.self_attn": window}) == [None, 6]
    assert of({"model.layers.*": window, "model.layers.0*": masks.causal()}) == [None, 6]
    assert of({"model.layers.*": window}, paths[::-1]) == [6, 6]
    for unbounded in (None, masks.causal(), window | masks.global_tokens([0])):
        assert of(unbounded) == [None, None]


def test_windows_of_layers_that_are_not_known():
    """Attentions without a number, with another's, and fewer of them than layers of the cache."""
    llama, sizes, window = small("llama"), (1, 4, LENGTH, LENGTH), masks.sliding_window(5, causal=True)
    paths = [f"model.layers.{n}.self_attn" for n in range(2)]
    for found, layers in (([paths[0], "model.layers.1.mlp"], 2), ([paths[0]] * 2, 2), (paths[:1], 2), (paths, 3)):
        assert windows_of_layers(llama, found, window, sizes, layers) == [None] * layers
