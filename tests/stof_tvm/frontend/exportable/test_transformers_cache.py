"""The cache of transformers' decoders, turned off where a model is exported or verified."""

import pytest
import torch

import stof_tvm
from stof_tvm.frontend.exportable.transformers_cache import caching_configs, without_cache

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def decoder():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


def test_it_stays_off_until_the_last_of_overlapping_uses_ends(decoder):
    first, second = without_cache(decoder, {}), without_cache(decoder, {})
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not decoder.config.use_cache and caching_configs(decoder, {}) == [decoder.config]
    second.__exit__(None, None, None)
    assert decoder.config.use_cache and caching_configs(decoder, {}) == [decoder.config]


def test_whoever_asks_for_a_cache_keeps_it(decoder):
    with without_cache(decoder, {"use_cache": True}):
        assert decoder.config.use_cache


def test_verification_computes_a_decoder_once(decoder):
    """With its cache it would return more than the engine, and be computed again."""
    calls = []
    handle = decoder.lm_head.register_forward_hook(lambda *_: calls.append(torch.compiler.is_exporting()))
    try:
        stof_tvm.build(decoder, "llvm", (torch.arange(8)[None],))
    finally:
        handle.remove()
    assert calls.count(False) == 1
