"""`build` of whole transformers models: outputs, output objects and the number of rewritten attentions."""

import pytest
import torch

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.transformers_models import transformers_inputs, transformers_model

# Attentions in the test models of one layer; T5 has an encoder, a decoder and its cross attention.
SITES = {"bert": 1, "gpt2": 1, "llama": 1, "t5": 3, "vit": 1}


@pytest.mark.slow  # compiles ten models
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", SITES)
@torch.no_grad()
def test_every_attention_runs_on_a_sparse_kernel(family, attention):
    model = transformers_model(family, attention)
    inputs = transformers_inputs(family, padded=True)
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, strict=True)
    expected, actual = model(**inputs), engine(**inputs)
    assert type(actual) is type(expected) and list(actual) == list(expected)
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], atol=2e-5, rtol=1e-4)  # and of one dtype
    sites = engine.report().sites
    assert len(sites) == SITES[family] and all(site.rewritten for site in sites)
