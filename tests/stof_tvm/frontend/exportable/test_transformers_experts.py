"""Experts of transformers: a mixture against PyTorch, and loops over experts switched while a model is exported."""

import pytest
import torch

import stof_tvm
from stof_tvm.errors import ExportError
from stof_tvm.frontend.exportable.transformers_experts import NOTE, grouped_experts, looping_configs
from tests.models.quick_llvm import QUICK_LLVM

transformers = pytest.importorskip("transformers")


def mixture(**options):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 64, "num_local_experts": 5, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    return transformers.MixtralModel(transformers.MixtralConfig(**sizes, use_cache=False, **options)).eval()


def build(model, ids):
    return stof_tvm.build(model, QUICK_LLVM, (ids,), tuning_logs=False, verify=False)


@pytest.mark.slow
def test_experts_that_are_looped_over_become_grouped_products():
    model, ids = mixture(), torch.randint(0, 64, (2, 9))
    model.set_experts_implementation("eager")
    engine = build(model, ids)
    assert model.config._experts_implementation == "eager" and NOTE in str(engine.report())
    assert any("grouped_linear" in segment.operators for segment in engine.report().segments)
    for given in (ids, torch.zeros_like(ids), torch.randint(0, 64, (2, 9))):
        with torch.no_grad():
            expected = model(given).last_hidden_state
        torch.testing.assert_close(engine(given)["last_hidden_state"], expected, atol=1e-5, rtol=1e-5)


def test_the_switch_ends_with_the_last_of_overlapping_uses():
    model = mixture()
    assert looping_configs(model) == []
    model.set_experts_implementation("eager")
    first, second = grouped_experts(model), grouped_experts(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model.config._experts_implementation == "grouped_mm" and looping_configs(model) == [model.config]
    second.__exit__(None, None, None)
    assert model.config._experts_implementation == "eager" and looping_configs(model) == [model.config]


def test_an_implementation_that_can_be_exported_is_kept():
    model = mixture(experts_implementation="batched_mm")
    with grouped_experts(model):
        assert model.config._experts_implementation == "batched_mm"
    assert looping_configs(torch.nn.Linear(4, 4)) == []


class Loop(torch.nn.Module):
    def forward(self, x, expert):
        out = torch.zeros_like(x)
        for number in torch.bincount(expert, minlength=3).nonzero():
            rows = torch.where(expert == number[0])[0]
            out.index_add_(0, rows, x[rows] * number)
        return out


def test_a_loop_of_a_model_s_own_is_refused_with_the_way_out():
    with pytest.raises(ExportError, match=r"grouped products \(torch\.nn\.functional\.grouped_mm"):
        stof_tvm.build(Loop(), QUICK_LLVM, (torch.randn(4, 8), torch.tensor([0, 2, 1, 0])))
