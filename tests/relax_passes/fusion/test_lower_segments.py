"""Lowering: template kernels between the views of a group, TVM's own kernels elsewhere, and what is recorded."""

import json

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.partition_segments import SEGMENTS, PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.schedule.cpu import cpu_passes
from tests.models.quick_llvm import QUICK_LLVM as LLVM
from tests.relax_passes.fusion.fake_templates import template
from tests.relax_passes.fusion.modules import (
    encoder_decoder,
    gated_mlp,
    inputs_of,
    post_norm_layer,
    pre_norm_mlp,
    run,
)
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step


def lower(mod, text, templates):
    """The lowered module and its rows."""
    mod = PartitionSegments(FusionScheme(text))(mod)
    mod = LowerSegments(TemplateChooser(LLVM, templates))(mod)
    return mod, json.loads(str(mod.attrs[SEGMENTS]))


def finish(mod):
    with LLVM:
        return tvm.transform.Sequential(cpu_passes(LLVM))(mod)


def main_calls(mod) -> list[str]:
    """What "main" calls, in order: kernels by name, operators, groups."""
    found = []
    for binding in mod["main"].body.blocks[0].bindings:
        value = binding.value
        if isinstance(value, relax.Call):
            is_kernel = isinstance(value.op, tvm.ir.Op) and value.op.name == "relax.call_tir"
            callee = value.args[0] if is_kernel else value.op
            found.append(callee.name_hint if isinstance(callee, tvm.ir.GlobalVar) else callee.name)
    return found


POST_NORM = "00 11 00 1 0000 111 0000"


def test_a_layer_on_templates_is_one_kernel_a_segment():
    """Projections, attention, projection + residual + norm, linear + GELU, linear + residual + norm."""
    mod, rows = lower(post_norm_layer(), POST_NORM, [template()])
    kernels = [name for name in main_calls(mod) if name != "relax.reshape"]
    assert kernels == ["fused_loops"] * 3 + ["attention_kernel", "fused_loops1", "fused_loops2", "fused_loops3"]
    assert [row["kernel"] for row in rows] == ["loops"] * 3 + ["attention_kernel"] + ["loops"] * 3
    assert rows[4] == {
        "segment": 4,
        "operators": ["matmul", "add", "add", "layer_norm"],
        "kernel": "loops",
        "config": "plain loops",
        "predicted_us": 1.0,
        "measured_us": None,
        "reason": "the first template that computes it",
    }


def test_weights_are_read_as_they_are_stored():
    mod, _ = lower(gated_mlp(), "0 00 11 00", [template()])
    assert "relax.permute_dims" not in main_calls(mod)


SCHEMES = [
    (post_norm_layer, POST_NORM),
    (post_norm_layer, "00 11 00 1 00 11 000 11 00"),
    (pre_norm_mlp, "00 111 000"),
    (gated_mlp, "0 11 00 11"),
    (encoder_decoder, "0 11 00 1 0 1 0 11"),
]


@pytest.mark.parametrize("make, text", SCHEMES)
@pytest.mark.parametrize("kind", ["templates", "products", "default"])
def test_computes_what_the_operators_compute(make, text, kind):
    templates = {
        "templates": [template()],
        "products": [template(refuses=lambda p: None if isinstance(p, GemmProblem) and not p.norm else "no")],
        "default": [],
    }[kind]
    mod = make()
    values = inputs_of(mod)
    expected = run(mod, *values)
    lowered, rows = lower(mod, text, templates)
    if kind == "templates":
        assert all(row["kernel"] in ("loops", "attention_kernel") for row in rows)
    for actual, wanted in zip(run(finish(lowered), *values), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, atol=2e-5)


def test_the_problem_of_a_pre_norm_segment_keeps_the_sum():
    problems = []

    def note(problem):
        problems.append(problem)

    lower(pre_norm_mlp(), "00 111 000", [template(refuses=note)])
    first, second, third = problems
    assert first == RowProblem(8, 8, "float32", (Step("add", "matrix"),), Norm("layer_norm", 1e-5), keeps_sum=True)
    assert second == GemmProblem(8, 16, "float32", (Step("add", "row"), Step("gelu")), k=8)
    assert third == GemmProblem(8, 8, "float32", (Step("add", "row"), Step("add", "matrix")), k=16)


def test_the_first_template_that_computes_it_is_taken():
    only_norms = template("norms", refuses=lambda p: None if p.norm else "no norm")
    _, rows = lower(pre_norm_mlp(), "00 111 000", [only_norms, template()])
    assert [row["kernel"] for row in rows] == ["norms", "loops", "loops"]


def test_what_no_template_covers_says_why():
    picky = template("picky", refuses=lambda p: f"m={p.m} is odd today")
    mod, rows = lower(pre_norm_mlp(), "00 111 000", [picky])
    assert [row["kernel"] for row in rows] == ["default"] * 3
    assert rows[0]["reason"] == "picky: m=8 is odd today" and rows[0]["predicted_us"] is None
    assert all(not f.attrs.get("Primitive") for f in mod.functions.values() if isinstance(f, relax.Function))
    _, rows = lower(pre_norm_mlp(), "00 1111 00", [picky])
    assert rows[1]["reason"] == "picky: no rows as they are"
    _, rows = lower(pre_norm_mlp(), "0 11111 00", [picky])
    assert rows[1]["reason"] == "matmul follows the norm"
    _, rows = lower(pre_norm_mlp(), "00 111 000", [])
    assert {row["reason"] for row in rows} == {"TVM compiles it: fused kernels of this project are for GPUs"}


def test_default_kernels_do_not_cross_segments():
    """add + relu would be one kernel; the scheme keeps them apart."""
    mod = gated_mlp()
    together, _ = lower(mod, "0 00 11 00", [])
    apart, _ = lower(mod, "0 1 0 11 00", [])
    assert len(_kernels(finish(together))) + 1 == len(_kernels(finish(apart)))


def _kernels(mod) -> list[str]:
    return [name for name in main_calls(mod) if "reshape" not in name]


def test_workspace_comes_between_inputs_and_outputs_and_is_shared():
    mod, _ = lower(post_norm_layer(), POST_NORM, [template(workspace=[((4, 4), "float32"), ((2,), "uint32")])])
    values = [b.value for b in mod["main"].body.blocks[0].bindings]
    calls = [v for v in values if isinstance(v, relax.Call) and v.op == tvm.ir.Op.get("relax.call_tir")]
    fused = [call for call in calls if call.args[0].name_hint.startswith("fused")]
    spaces = [call.args[1].fields[-2:] for call in fused]
    assert [tuple(x.ty.shape) for x in spaces[0]] == [(4, 4), (2,)] and not spaces[0][0].value.numpy().any()
    assert all(a.same_as(b) for space in spaces for a, b in zip(space, spaces[0]))


def test_equal_problems_share_a_kernel():
    mod, _ = lower(post_norm_layer(), POST_NORM, [template()])
    kernels = [f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc)]
    assert len(kernels) == 5, "attention, three alike projections, and three others"
