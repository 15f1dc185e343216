"""The measured models: transformers' classes from configurations, random weights, nothing downloaded.

All return the last hidden state: heads and pooling are left out, which every system would compute alike.
"""

import torch
from torch import nn

from benchmarks.models.cases import ModelCase

LAYERS_TINY = 1


class LastHiddenState(nn.Module):
    """A transformers model as a function of one tensor, and of a mask to add to the scores, if it takes any."""

    def __init__(self, model: nn.Module, name: str):
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x, added_mask=None):
        mask = {} if added_mask is None else {"attention_mask": added_mask}
        return self.model(**{self.name: x}, **mask).last_hidden_state


def make_model(case: ModelCase, attention: str = "sdpa", small: bool = False) -> LastHiddenState:
    """The case's model in its dtype, on the CPU, weights seeded; `attention` is transformers' attn_implementation.

    `small` makes one narrow layer, for dry runs.
    """
    import transformers as hf

    torch.manual_seed(0)
    options = {"attn_implementation": attention}
    length = max(case.q_len, 512)
    if case.model == "bert":
        sizes = _sizes(12, 768, 12, 3072, small)
        config = hf.BertConfig(**sizes, max_position_embeddings=length, **options)
        model = hf.BertModel(config, add_pooling_layer=False)
    elif case.model == "gpt2":
        sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12}
        sizes = {"n_layer": LAYERS_TINY, "n_embd": 32, "n_head": 2} if small else sizes
        model = hf.GPT2Model(hf.GPT2Config(**sizes, n_positions=length, use_cache=False, **options))
    elif case.model == "llama":
        sizes = _sizes(16, 1024, 16, 2816, small)
        kv_heads = 1 if small else 4
        config = hf.LlamaConfig(
            **sizes, num_key_value_heads=kv_heads, max_position_embeddings=length, use_cache=False, **options
        )
        model = hf.LlamaModel(config)
    elif case.model == "t5-encoder":
        sizes = {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_kv": 64, "d_ff": 3072}
        small_sizes = {"num_layers": LAYERS_TINY, "d_model": 32, "num_heads": 2, "d_kv": 16, "d_ff": 64}
        model = hf.T5EncoderModel(hf.T5Config(**(small_sizes if small else sizes), use_cache=False, **options))
    elif case.model == "vit":
        sizes = _sizes(12, 768, 12, 3072, small)
        config = hf.ViTConfig(**sizes, image_size=image_size(case.q_len), patch_size=16, **options)
        model = hf.ViTModel(config, add_pooling_layer=False)
    else:
        raise ValueError(f"model {case.model!r} is not one that the benchmark knows")
    name = "pixel_values" if case.model == "vit" else "input_ids"
    return LastHiddenState(model, name).eval().to(getattr(torch, case.dtype))


def make_inputs(case: ModelCase, count: int, device: str) -> list[torch.Tensor]:
    """Random token ids (batch, length), int64, or images (batch, 3, height, width); the same in every process."""
    generator = torch.Generator(device=device).manual_seed(0)
    if case.model == "vit":
        shape = case.batch, 3, *image_size(case.q_len)
        images = [torch.randn(shape, generator=generator, device=device) for _ in range(count)]
        return [image.to(getattr(torch, case.dtype)) for image in images]
    shape = case.batch, case.q_len
    return [torch.randint(0, 30000, shape, generator=generator, device=device) for _ in range(count)]


def image_size(patches: int) -> tuple[int, int]:
    """Height and width in pixels of an image of so many 16×16 patches (a power of two)."""
    rows = 1 << ((patches.bit_length() - 1) // 2)
    return 16 * rows, 16 * (patches // rows)


def is_causal(case: ModelCase) -> bool:
    """Whether the model's own mask is causal; the measured mask then restricts it further."""
    return case.model in ("gpt2", "llama")


def _sizes(layers, width, heads, intermediate, small) -> dict:
    values = (LAYERS_TINY, 32, 2, 64) if small else (layers, width, heads, intermediate)
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    return dict(zip(names, values, strict=True))
