"""Small causal language models, and engines that several tests use."""

import functools

import pytest
import torch

pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from stof_tvm.generation import engines  # noqa: E402
from tests.models.quick_llvm import QUICK_LLVM  # noqa: E402

VOCABULARY, LENGTH, WINDOW = 96, 288, 12
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=LENGTH, pad_token_id=0, initializer_range=0.3)
SIZES |= dict(bos_token_id=None, eos_token_id=None)
ONE_LAYER = {**SIZES, "num_hidden_layers": 1}
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=LENGTH, initializer_range=0.3)
GPT2.bos_token_id = GPT2.eos_token_id = None
GEMMA = {**SIZES, "sliding_window": WINDOW, "tie_word_embeddings": False, "initializer_range": 2.0}
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**ONE_LAYER)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**ONE_LAYER, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**GEMMA)),
}


@functools.cache
def small(name: str):
    """A model that nobody changes."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


@functools.cache
def generator(name: str, batch: int = 2, prompt: tuple = (32,)):
    return engines(small(name), max_length=LENGTH, batch=batch, prompt=prompt, target=QUICK_LLVM)


def tokens(*shape, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="session")
def two():
    """Engines of a LLaMA for two sequences at once."""
    return generator("llama", prompt=(16, 32))
