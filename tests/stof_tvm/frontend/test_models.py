"""Whole models import, keep their attention sites and, compiled for this CPU, give PyTorch's numbers."""

import sys

import pytest
import torch
from torch.utils._pytree import tree_leaves

from stof_tvm.frontend import import_model
from tests.models.families import example_calls
from tests.models.running import attention_sites, compile_imported, error_against_torch, operator_names, softmax_sites
from tests.models.transformers_models import NAMES, transformers_inputs, transformers_model
from tests.models.zoo import make

SITES = {
    "bert": ["layers.0", "layers.1"],
    "gpt": ["blocks.0", "blocks.1"],
    "llama": ["blocks.0", "blocks.1"],
    "t5": ["encode", "decode", "cross"],
    "vit": ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"],
}
TRANSFORMERS_SITES = {
    "bert": ["encoder.layer.0.attention.self"],
    "gpt2": ["transformer.h.0.attn"],
    "llama": ["model.layers.0.self_attn"],
    "t5": [
        "encoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.0.SelfAttention",
        "decoder.block.0.layer.1.EncDecAttention",
    ],
    "vit": ["layers.0.attention"],
}
MORE = (
    *("MistralModel", "Gemma3ForCausalLM", "FalconModel", "BloomModel", "ModernBertForMaskedLM", "DebertaV2Model"),
    "BartForConditionalGeneration",
)
TOLERANCE = 1e-5


def seeded(family, **sizes):
    torch.manual_seed(0)
    model, args = example_calls()[family]
    return model(**sizes).eval(), args


@pytest.mark.parametrize("family", SITES)
def test_family(family):
    model, args = seeded(family)
    imported = import_model(model, args)
    assert [*attention_sites(imported.mod), *softmax_sites(imported.mod)] == SITES[family]
    assert error_against_torch(model, args, imported=imported) < TOLERANCE


@pytest.mark.parametrize(
    "family, dtype",
    [
        *(("bert", torch.float16), ("bert", torch.bfloat16), ("llama", torch.bfloat16)),
        pytest.param("gpt", torch.float16, marks=pytest.mark.slow),  # 4 s each
        pytest.param("t5", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("vit", torch.float16, marks=pytest.mark.slow),
    ],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_family_in_half_precision(family, dtype):
    """TVM types linear layers float32, which do not add to a half bias, and cannot compile a bfloat16 layer_norm.

    Errors are against single precision; LLVM accumulates matmuls in half precision, hence 4 times PyTorch's error.
    """
    model, args = seeded(family, **({} if family == "t5" else {"layers": 1}))
    exact = tree_leaves(model(*args))
    model, args = model.to(dtype), [x.to(dtype) if x.is_floating_point() else x for x in args]
    expected, got = tree_leaves(model(*args)), tree_leaves(compile_imported(import_model(model, tuple(args)))(*args))
    for x, half, single in zip(got, expected, exact, strict=True):
        assert x.dtype == half.dtype == dtype
        assert (x - single).abs().max() <= 4 * (half - single).abs().max()


def test_layers_keep_their_structure():
    model, args = seeded("gpt")
    names = operator_names(import_model(model, args).mod)
    block = ["nn.layer_norm", "permute_dims", "matmul", "add", "split"]
    start = names.index("nn.layer_norm")
    assert names[start : start + 5] == block
    assert names.count("nn.layer_norm") == 5 and names.count("nn.gelu_tanh") == 2
    assert names.count("matmul") == 2 * 4 + 1 and "nn.softmax" not in names
    model, args = seeded("llama")
    names = operator_names(import_model(model, args).mod)
    assert names.count("nn.rms_norm") == 5 and names.count("nn.silu") == 2 and "repeat" not in names


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_transformers(name, attention, monkeypatch):
    """Found as exported, without a second trace; numbers: tests/stof_tvm/test_build_transformers.py."""
    monkeypatch.delattr(sys.modules[import_model.__module__], "decompose")
    imported = import_model(transformers_model(name, attention), (), transformers_inputs(name, padded=True))
    sites = attention_sites(imported.mod) if attention == "sdpa" else softmax_sites(imported.mod)
    assert list(sites) == TRANSFORMERS_SITES[name]


@pytest.mark.slow  # seven more architectures, half a minute on one core
@pytest.mark.parametrize(
    "name, attention",
    [
        *((name, "default") for name in MORE),
        *((name, "eager") for name in ("Gemma3ForCausalLM", "FalconModel", "BartForConditionalGeneration")),
    ],
)
def test_more_transformers(name, attention):
    model, _ = make(name, **({"attn_implementation": "eager"} if attention == "eager" else {}))
    inputs = transformers_inputs("bert", padded=True)
    imported = import_model(model, (), inputs)
    assert len(attention_sites(imported.mod)) + len(softmax_sites(imported.mod)) == (
        3 if name.startswith("Bart") else 1
    )
    got, expected = compile_imported(imported)(**inputs)[0], model(**inputs)[0]
    assert (got - expected).abs().max() < TOLERANCE
