"""Attention of PyTorch's own modules and of transformers' models: how many sites, in which form, and the numbers."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from tvm.ir.expr import GenericConst

from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN, CanonicalizeAttention

transformers = pytest.importorskip("transformers")

BATCH, LENGTH = 2, 12
CAUSAL = np.tril(np.ones((LENGTH, LENGTH), bool))


def small(kind: str, implementation: str):
    torch.manual_seed(0)
    common = {"vocab_size": 100, "attn_implementation": implementation}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 32, "intermediate_size": 64}
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**common, **layers))
    if kind == "gpt2":
        tokens = {"bos_token_id": 0, "eos_token_id": 0}
        config = transformers.GPT2Config(
            **common, **tokens, n_embd=32, n_layer=1, n_head=4, n_positions=64, use_cache=False
        )
        return transformers.GPT2Model(config)
    if kind == "llama":
        return transformers.LlamaModel(
            transformers.LlamaConfig(**common, **layers, num_key_value_heads=2, use_cache=False)
        )
    if kind == "t5":
        config = transformers.T5Config(
            **common, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, use_cache=False
        )
        return transformers.T5Model(config)
    vit = transformers.ViTConfig(image_size=32, patch_size=8, attn_implementation=implementation, **layers)
    return transformers.ViTModel(vit)


def arguments(kind: str, padded: bool):
    generator = torch.Generator().manual_seed(1)
    if kind == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32, generator=generator)}
    result = {"input_ids": torch.randint(0, 100, (BATCH, LENGTH), generator=generator)}
    if padded:
        mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
        mask[1, LENGTH - 4 :] = 0
        result["attention_mask"] = mask
    if kind == "t5":
        result["decoder_input_ids"] = torch.randint(0, 100, (BATCH, LENGTH), generator=generator)
    return result


# Of each site: the constant mask, the bias's shape without and with attention_mask.
FORMS = {
    "bert": [(None, None, (BATCH, 1, 1, LENGTH))],
    "gpt2": [(CAUSAL, None, (BATCH, 1, 1, LENGTH))],
    "llama": [(CAUSAL, None, (BATCH, 1, 1, LENGTH))],
    "t5": [
        (None, (1, 4, LENGTH, LENGTH), (BATCH, 4, LENGTH, LENGTH)),
        (CAUSAL, (1, 4, LENGTH, LENGTH), (1, 4, LENGTH, LENGTH)),
        (None, None, (BATCH, 1, 1, LENGTH)),
    ],
    "vit": [(None, None, None)],
}
TAKEN = {("bert", "sdpa", False), ("gpt2", "eager", True), ("llama", "eager", False), ("vit", "sdpa", False)}
FAST = {
    ("bert", "eager", True),
    ("gpt2", "sdpa", False),
    ("llama", "sdpa", True),
    ("t5", "eager", True),
    ("vit", "eager", False),
}
CASES = [
    pytest.param(
        kind, implementation, padded, marks=[] if (kind, implementation, padded) in FAST else pytest.mark.slow
    )  # each exports and compiles a model
    for kind in FORMS
    for implementation in ("sdpa", "eager")
    for padded in (False, True)
    if kind == "t5" or (kind, implementation, padded) in FAST | TAKEN
]


@pytest.mark.parametrize("kind, implementation, padded", CASES)
def test_transformers(compile_model, kind, implementation, padded):
    compiled = compile_model(small(kind, implementation), kwargs=arguments(kind, padded))
    assert len(compiled.mod.attrs[NOT_REWRITTEN]) == 0
    assert len(compiled.calls) == len(FORMS[kind])
    for call, (mask, bias, padded_bias) in zip(compiled.calls.values(), FORMS[kind]):
        assert (call.spelling == "sdpa") == (implementation == "sdpa")
        if mask is None and not call.causal:
            assert call.mask is None
        elif not call.causal:
            np.testing.assert_array_equal(call.mask.value.numpy()[0, 0], mask)
        shape = None if call.bias is None else tuple(int(n) for n in call.bias.ty.shape)
        assert shape == (padded_bias if padded else bias)
        if kind == "llama":
            assert int(call.k.ty.shape[1]) == int(call.v.ty.shape[1]) == 2
    if not padded:  # tests/stof_tvm/test_build_transformers.py has the numbers of padded models, after all passes
        assert max(compiled.error(i) for i in range(len(compiled.expected))) < 1e-5


@pytest.mark.parametrize("implementation", [pytest.param("sdpa", marks=pytest.mark.slow), "eager"])
def test_left_padding_changes_nothing_that_counts(compile_model, implementation):
    """Rows whose every causal key is padding may differ from PyTorch's eager attention; others must not."""
    kwargs = arguments("llama", True)
    kwargs["attention_mask"] = kwargs["attention_mask"].flip(1)
    compiled = compile_model(small("llama", implementation), kwargs=kwargs)
    keep = kwargs["attention_mask"].bool()
    difference = (compiled.outputs[0] - compiled.expected[0]).abs()
    assert difference[keep].max() < 1e-5
    if implementation == "sdpa":
        assert difference.max() < 1e-5


class MultiheadAttention(nn.Module):
    def __init__(self, need_weights=False, returns_weights=False, mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.need_weights = need_weights
        self.returns_weights = returns_weights
        self.register_buffer("mask", mask)

    def forward(self, x, padding=None):
        out, weights = self.attention(
            x, x, x, attn_mask=self.mask, key_padding_mask=padding, need_weights=self.need_weights
        )
        return (out, weights) if self.returns_weights else out


FORBIDDEN = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
PADDING = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
PADDING[1, LENGTH - 3 :] = True


MULTIHEAD = [
    pytest.param(need_weights, mask, padded, marks=[] if mask == "bool" else pytest.mark.slow)  # each compiles a model
    for number, mask in enumerate((None, "bool", "float"))
    for need_weights in (False, True)
    for padded in [(number % 2 == 1) != need_weights]
]


@pytest.mark.parametrize("need_weights, mask, padded", MULTIHEAD)
def test_multihead_attention(compile_model, need_weights, mask, padded):
    tensors = {None: None, "bool": FORBIDDEN, "float": torch.where(FORBIDDEN, -math.inf, 0.0)}
    model = MultiheadAttention(need_weights, False, tensors[mask])
    x = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    compiled = compile_model(model, (x, PADDING) if padded else (x,))
    (call,) = compiled.calls.values()
    if mask is None:
        assert call.mask is None
    else:
        np.testing.assert_array_equal(call.mask.value.numpy()[0, 0], CAUSAL)
    assert (call.bias is not None) == padded
    if padded:
        assert int(call.bias.ty.shape[2]) == 1 and not isinstance(call.bias, GenericConst)
    assert compiled.error(0) < 2e-6


def test_attention_that_returns_its_weights_stays(compile_model):
    x = torch.randn(BATCH, LENGTH, 32, generator=torch.Generator().manual_seed(0))
    compiled = compile_model(MultiheadAttention(True, True), (x,), passes=[CanonicalizeAttention()])
    assert compiled.calls == {}
    ((site, reason),) = compiled.mod.attrs[NOT_REWRITTEN]
    assert site == "attention" and "another reader" in reason and "need_weights=False" in reason


class OneHot(nn.Module):
    """TVM's one_hot keeps its function from being a dataflow block."""

    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, q, k, v):
        return functional.one_hot(self.attend(q, k, v).argmax(-1), v.shape[-1]).float()


@pytest.mark.parametrize(
    "attend",
    [
        functional.scaled_dot_product_attention,
        lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v,
        lambda q, k, v: torch.softmax(k @ q.mT, -2).mT @ v,
    ],
    ids=["sdpa", "softmax", "transposed"],
)
def test_attention_in_a_function_without_a_dataflow_block(compile_model, attend):
    q, k, v = torch.randn(3, 2, 3, 4, 8, generator=torch.Generator().manual_seed(0))
    compiled = compile_model(OneHot(attend), (q, k, v))
    assert len(compiled.calls) == 1 and compiled.error(0) == 0
