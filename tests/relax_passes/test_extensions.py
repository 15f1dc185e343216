"""Templates and rules of a user's own: where they stand in the pipeline, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
import tvm

import stof_tvm
from relax_passes.extensions import TEMPLATE, Extensions
from stof_tvm.errors import InputError
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.fake_templates import template
from tir_kernels.attention.registry import TEMPLATES as ATTENTION_TEMPLATES


class AddAndNorm(torch.nn.Module):
    """Two results: a sum and its norm, which TVM's own rules do not compute in one kernel."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(24)

    def forward(self, x, y):
        x = x + y
        return self.norm(x), x


def built(**extensions):
    torch.manual_seed(0)
    model, inputs = AddAndNorm().eval(), (torch.randn(2, 8, 24), torch.randn(2, 8, 24))
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, tuning_logs=False, **extensions)
    for actual, expected in zip(engine(*inputs), model(*inputs)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    return engine.report()


def test_a_template_goes_before_what_there_is_and_is_in_the_report():
    (segment,) = built(templates=[template("mine", us=0.1)]).segments
    assert segment.kernel == "mine" and segment.operators == ("add", "layer_norm")


def test_a_template_that_refuses_or_is_for_another_kind_of_target_computes_nothing():
    refuses = template("mine", refuses=lambda problem: "it refuses everything")
    other = SimpleNamespace(**{**vars(template("other")), "TARGET_KIND": "cuda"})
    for segment in built(templates=[other, refuses]).segments:
        assert segment.kernel == "default" and segment.reason == "mine: it refuses everything"


def test_a_rule_runs_once_on_operators_before_they_are_cut():
    seen = []

    @tvm.transform.module_pass(opt_level=0)
    def rule(mod, _):
        seen.append("R.nn.layer_norm" in mod.script() and "segment" not in mod.script())
        return mod

    built(rules=[rule])
    assert seen == [True]


@pytest.mark.parametrize("missing", TEMPLATE)
def test_a_template_that_lacks_something_is_refused(missing):
    parts = {name: value for name, value in vars(template("mine")).items() if name != missing}
    with pytest.raises(InputError, match=f"has no {missing}"):
        Extensions([SimpleNamespace(**parts)])


def test_a_template_of_attention_is_refused_instead_of_never_asked():
    with pytest.raises(InputError, match="'block-wise' computes attentions"):
        Extensions([next(x for x in ATTENTION_TEMPLATES if x.NAME == "block-wise")])


def test_a_rule_that_is_no_pass_is_refused():
    with pytest.raises(InputError, match="tvm.transform.Pass, got function"):
        Extensions(rules=[lambda mod: mod])


def test_the_project_s_own_templates_have_what_is_asked_of_others():
    from tir_kernels.fusion.registry import TEMPLATES

    assert Extensions(TEMPLATES).templates == TEMPLATES
