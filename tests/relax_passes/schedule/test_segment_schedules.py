import json

import torch
import tvm
from tvm import relax

import stof_tvm
from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.partition_segments import SEGMENTS, PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.schedule.cpu import cpu_functions, cpu_passes
from relax_passes.schedule.cpu_rules.plain import PLAIN
from relax_passes.schedule.segment_schedules import SCHEDULE
from relax_passes.tuned_choices import TunedChoices
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.schedule.test_apply_tuning_records import Log, trace_of
from tir_kernels.tuning.workload import primfunc_workload

op = relax.op


def module(recurrence=False):
    """softmax(x W), a layer norm behind it in a segment of its own, or a running sum, for which there is no rule."""
    builder = relax.BlockBuilder()
    x, w = relax.Var("x", relax.TensorType((16, 32), "float32")), relax.Var("w", relax.TensorType((32, 32), "float32"))
    gamma = relax.Var("gamma", relax.TensorType((32,), "float32"))
    with builder.function("main", [x, w, gamma]):
        with builder.dataflow():
            y = builder.emit(op.nn.softmax(builder.emit(op.matmul(x, w))))
            y = op.cumsum(y, 1) if recurrence else op.nn.rms_norm(y, gamma, -1)
            out = builder.emit_output(builder.emit(y))
        builder.emit_func_output(out)
    return builder.finalize()


def rows(mod, scheme: str, tuned=None) -> list[dict]:
    mod = LowerSegments(TemplateChooser(QUICK_LLVM, []))(PartitionSegments(FusionScheme(scheme))(mod))
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM, tuned))(mod)
    return json.loads(str(mod.attrs[SEGMENTS]))


def test_the_rules_that_schedule_a_segment():
    first, second = rows(module(), "00 1")
    assert first["operators"] == ["matmul", "softmax"] and second["operators"] == ["rms_norm"]
    assert first["config"] == "schedule rule generic, schedule rule rows"
    assert second["config"] == "schedule rule rows"
    (both,) = rows(module(), "000")
    assert both["config"] == "schedule rule generic, schedule rule rows (×2)"


def test_a_tuning_record():
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_functions())(module())
    softmax = next(f for f in mod.functions.values() if "T_softmax_norm" in f.script())
    workload = primfunc_workload(softmax)
    tuned = TunedChoices(Log(workload, trace_of(workload)), QUICK_LLVM)
    first, _ = rows(module(), "00 1", tuned)
    assert first["config"] == "schedule rule generic, tuned schedule"


def test_what_no_rule_covers():
    first, *_ = reversed(rows(module(recurrence=True), "00 1"))
    assert "schedule rule" not in first["config"] and first["config"]


def test_a_schedule_that_does_not_compile(monkeypatch):
    """The report says what computes a segment, not what was to."""
    real = relax.build

    def build(mod, *args, **kwargs):
        scheduled = [f.attrs for f in mod.functions.values() if PLAIN in (f.attrs or {})]
        if any(attrs[SCHEDULE] == "schedule rule rows" for attrs in scheduled):
            raise ValueError("vectors that LLVM does not know")
        return real(mod, *args, **kwargs)

    model, x = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Softmax(-1)), torch.randn(16, 32)
    options = dict(fusion_scheme="00 1", tuning_logs=False)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), **options)
    assert "schedule rule rows" in [row.config for row in engine.report().segments]
    monkeypatch.setattr(relax, "build", build)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), **options)
    configs = [row.config for row in engine.report().segments]
    assert "plain loops (schedule rule rows does not compile)" in configs and "schedule rule rows" not in configs
    torch.testing.assert_close(engine(x), model(x), atol=1e-6, rtol=1e-5)


def test_a_module_without_segments():
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(module())
    assert SEGMENTS not in mod.attrs
