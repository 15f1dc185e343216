"""The measured models and lengths, in float32 and with the models' own masks: BERT, ModernBERT and ViT, all base."""

import torch
from torch import nn

from benchmarks.models.cases import ModelCase
from benchmarks.models.families import LastHiddenState, image_size

MODELS = ("bert", "modernbert", "vit")
LENGTHS = (128, 512, 2048)
IMAGE_224 = 196  # patches of the image that ViT-base is published for


def model_cases() -> list[ModelCase]:
    """Short lengths first, so that a plan that is cut off still has a case of each model."""
    cases = [ModelCase(model, 1, length, "own", "float32") for length in LENGTHS for model in MODELS]
    return [ModelCase("vit", 1, IMAGE_224, "own", "float32"), *cases]


def make_model(case: ModelCase, attention: str = "sdpa", small: bool = False) -> nn.Module:
    """transformers' class at its default sizes, which are the base ones, up to the last hidden state; weights seeded.

    `small` makes one narrow layer, for dry runs.
    """
    import transformers as hf

    torch.manual_seed(0)
    options: dict = {"attn_implementation": attention}
    if small:
        options |= {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    if case.model == "bert":
        config = hf.BertConfig(**options, max_position_embeddings=max(case.q_len, 512))
        model = hf.BertModel(config, add_pooling_layer=False)
    elif case.model == "modernbert":
        model = hf.ModernBertModel(hf.ModernBertConfig(**options))
    elif case.model == "vit":
        model = hf.ViTModel(hf.ViTConfig(**options, image_size=_image(case)), add_pooling_layer=False)
    else:
        raise ValueError(f"model {case.model!r} is not one that the benchmark knows")
    return LastHiddenState(model, "pixel_values" if case.model == "vit" else "input_ids").eval()


def make_input(case: ModelCase) -> torch.Tensor:
    """Token ids (1, length), int64, or an image (1, 3, height, width), float32; the same in every process."""
    generator = torch.Generator().manual_seed(0)
    if case.model == "vit":
        return torch.randn(case.batch, 3, *_image(case), generator=generator)
    return torch.randint(0, 30000, (case.batch, case.q_len), generator=generator)


def _image(case: ModelCase) -> tuple[int, int]:
    return (224, 224) if case.q_len == IMAGE_224 else image_size(case.q_len)
