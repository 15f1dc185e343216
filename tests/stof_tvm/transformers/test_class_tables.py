"""Models that look for the class of their attention in a table are refused by name, and no others."""

import pytest
import torch
import transformers
from transformers.models.falcon import modeling_falcon

import stof_tvm.transformers  # noqa: F401  registers "stof"
from stof_tvm.errors import UnsupportedError
from stof_tvm.transformers.class_tables import class_tables, refuse_in_class_tables

SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
MODELS = {
    "FALCON_ATTENTION_CLASSES": ("FalconForCausalLM", SIZES),
    "GPTJ_ATTENTION_CLASSES": ("GPTJModel", dict(vocab_size=64, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)),
    "GPT_NEO_ATTENTION_CLASSES": (
        "GPTNeoModel",
        dict(vocab_size=64, hidden_size=32, num_layers=1, num_heads=2, attention_types=[[["global"], 1]]),
    ),
    "SAM_VISION_ATTENTION_CLASSES": (
        "SamVisionModel",
        dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16, mlp_dim=32),
    ),
}


def made(kind, sizes, attention):
    model = getattr(transformers, kind)
    return model(model.config_class(**sizes, attn_implementation=attention)).eval()


@pytest.mark.parametrize("table", MODELS)
def test_a_model_that_looks_in_a_table_is_refused(table):
    kind, sizes = MODELS[table]
    with pytest.raises(UnsupportedError, match=f"{table}, which has no 'stof'.*stof_tvm.build"):
        made(kind, sizes, "stof")
    assert made(kind, sizes, None).config._attn_implementation in ("sdpa", "eager")
    with pytest.raises(ValueError, match="no_such"):  # transformers' own words for a name that nobody registered
        made(kind, sizes, "no_such")


def test_other_models_are_not(decoder):
    assert decoder("Llama").config._attn_implementation == "stof"


def test_a_model_beside_a_table_that_does_not_look_there_is_not():
    class Beside(transformers.LlamaModel):
        pass

    Beside.__module__ = modeling_falcon.__name__
    config = transformers.LlamaConfig(**SIZES, intermediate_size=32, attn_implementation="stof")
    with torch.no_grad():
        assert Beside(config)(torch.zeros(1, 4, dtype=torch.int64))[0].isfinite().all()


def test_tables_are_dicts_of_layers(monkeypatch):
    monkeypatch.setattr(modeling_falcon, "SIZES", {"eager": 3}, raising=False)
    assert class_tables(modeling_falcon).keys() == {"FALCON_ATTENTION_CLASSES"}
    assert class_tables(transformers.models.llama.modeling_llama) == {}


def test_transformers_check_is_wrapped_once():
    check = transformers.PreTrainedModel._check_and_adjust_attn_implementation
    refuse_in_class_tables("stof")
    assert transformers.PreTrainedModel._check_and_adjust_attn_implementation is check
