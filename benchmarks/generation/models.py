"""The measured models, causal or with windows, and prompts."""

import torch
from torch import nn

from benchmarks.generation.cases import GenerateCase
from benchmarks.zoo.make import transformers_model
from benchmarks.zoo.models import MODELS as ZOO
from benchmarks.zoo.models import ZooModel

PROMPT_IDS = (3, 30000)
# Classes of a causal model and of the same with windows.  Their parameters have the same names.
KINDS = {
    "Llama-3.2-1B": ("LlamaForCausalLM", "MistralForCausalLM"),
    "Qwen3-0.6B": ("Qwen3ForCausalLM", "Qwen3ForCausalLM"),
}


def make_model(case: GenerateCase, attention: str = "sdpa", small: bool = False, windows: bool = True) -> nn.Module:
    """The case's model in its dtype, on the CPU; `small` makes two narrow layers.

    With `windows` the model's own attention has the case's window, if that has one.
    """
    windowed = windows and case.window > 0
    sizes = {**ZOO[case.model].sizes, "tie_word_embeddings": True, "max_position_embeddings": max(case.cache, 128)}
    if windowed:
        sizes["sliding_window"] = case.window
    if windowed and case.model.startswith("Qwen"):
        sizes |= {"use_sliding_window": True, "max_window_layers": 0}
    kind = KINDS[case.model][windowed]
    model = transformers_model(ZooModel(case.model, kind, (), sizes), case.dtype, attention, small)
    model.config.use_cache = model.generation_config.use_cache = True
    model.generation_config.update(eos_token_id=None, pad_token_id=0, do_sample=False)
    return model


def cache_bytes(case: GenerateCase) -> int:
    """What keys and values of all tokens take, in half precision."""
    sizes = ZOO[case.model].sizes
    heads = sizes["num_attention_heads"]
    width = sizes.get("num_key_value_heads", heads) * sizes.get("head_dim", sizes["hidden_size"] // heads)
    return case.batch * case.cache * sizes["num_hidden_layers"] * 2 * width * 2


def make_prompts(case: GenerateCase, device: str) -> torch.Tensor:
    """Random token ids, int64 (batch, prompt), the same in every process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(*PROMPT_IDS, (case.batch, case.prompt), generator=generator).to(device)
