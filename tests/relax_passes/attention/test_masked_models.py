"""Models of transformers with attentions of their own, and a mask that is given, against eager PyTorch."""

from unittest import mock

import pytest
import torch
from torch.nn import functional

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM

transformers = pytest.importorskip("transformers")

LENGTH = 16
MASK = masks.sliding_window(3)
TOKENS = {"vocab_size": 64, "hidden_size": 32, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0}


def gpt_neo():
    """float32 scores without a scale; a layer's own mask is filled in, and another is added."""
    config = transformers.GPTNeoConfig(
        **TOKENS, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], window_size=2
    )
    return transformers.GPTNeoModel(config)


def deepseek_v3():
    """Heads of queries and keys are wider than those of values, and share a part."""
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(
        **TOKENS, **latent, **layers, intermediate_size=32, attn_implementation="eager"
    )
    return transformers.DeepseekV3Model(config)


def swin_v2():
    """Cosines times a learned scale of each head, and a bias; windows are moved in the second layer."""
    config = transformers.Swinv2Config(image_size=32, patch_size=4, embed_dim=16, depths=[2], num_heads=[2])
    return transformers.Swinv2Model(config)


def sam():
    """Biases of positions that are computed from the queries."""
    sizes = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 64}
    config = transformers.SamVisionConfig(
        **sizes, image_size=32, patch_size=8, window_size=4, global_attn_indexes=[0], attn_implementation="eager"
    )
    model = transformers.SamVisionModel(config)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


@pytest.mark.parametrize("make", [gpt_neo, deepseek_v3, swin_v2, sam], ids=lambda make: make.__name__)
def test_a_mask_reaches_every_attention(make):
    torch.manual_seed(0)
    model = make().eval()
    is_image = make in (swin_v2, sam)
    x = torch.randn(1, 3, 32, 32) if is_image else torch.randint(0, 64, (2, LENGTH))
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), MASK, verify=False)
    got, expected = first(engine(x)), masked(model, x)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    with torch.no_grad():
        assert not torch.allclose(got, first(model(x)), atol=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_gpt_neo(side):
    """Rows that are padding may differ."""
    torch.manual_seed(0)
    model = gpt_neo().eval()
    ids, keep = torch.randint(0, 64, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.int64)
    keep[1, slice(5) if side == "left" else slice(LENGTH - 5, None)] = 0
    inputs = {"input_ids": ids, "attention_mask": keep}
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, MASK, verify=False)
    real = keep.bool()
    torch.testing.assert_close(first(engine(**inputs))[real], masked(model, **inputs)[real], atol=2e-5, rtol=0)


def masked(model, *args, **kwargs) -> torch.Tensor:
    """What a model gives with scores masked before each softmax over keys."""
    softmax = functional.softmax

    def of_kept(x, dim, **options):
        square = x.dim() > 2 and x.shape[-1] == x.shape[-2]
        return softmax(x.masked_fill(~MASK.dense(x.shape[-1]), -torch.inf) if square else x, dim, **options)

    with torch.no_grad(), mock.patch.object(functional, "softmax", of_kept):
        return first(model(*args, **kwargs))


def first(result):
    return next(iter(result.values()))
