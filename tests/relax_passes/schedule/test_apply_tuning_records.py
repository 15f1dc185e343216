"""Schedules that a log has for PrimFuncs."""

import json
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import relax
from tvm.s_tir import Schedule

from relax_passes.schedule.apply_tuning_records import ApplyTuningRecords
from relax_passes.schedule.cpu import cpu_functions, cpu_passes
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.target import parse_target
from tir_kernels.tuning.workload import primfunc_workload

TARGET = parse_target("llvm")


@dataclass(frozen=True)
class Record:
    trace: list
    location: str = "log:1"


class Log:
    """Records of one workload, the softmax of `module`."""

    def __init__(self, workload, *traces):
        self.workload = workload
        self.records = [Record(trace, f"log:{i}") for i, trace in enumerate(traces, 1)]

    def ranked(self, workload, gpu):
        return self.records if tvm_ffi.structural_equal(workload, self.workload) else []


def module():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((8, 32), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(builder.emit(relax.op.nn.softmax(x)))
        builder.emit_func_output(out)
    return builder.finalize()


def functions(mod):
    return [f for _, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]


def unscheduled(mod):
    return tvm.transform.Sequential(cpu_functions())(mod)


def trace_of(workload, annotation="stof_test") -> list:
    """Marks the last block's loop, so that what was applied is seen."""
    sch = Schedule(workload, debug_mask="none")
    block = sch.get_sblock("T_softmax_norm")
    sch.annotate(sch.get_loops(block)[0], annotation, 1)
    return json.loads(json.dumps(sch.trace.as_json(), default=lambda x: x.value))


def test_a_recorded_schedule_goes_before_the_default_rules():
    with TARGET:
        (function,) = functions(unscheduled(module()))
    workload = primfunc_workload(function)
    tuned = TunedChoices(Log(workload, trace_of(workload)), TARGET)
    with TARGET:
        mod = tvm.transform.Sequential(cpu_passes(TARGET, tuned))(module())
    (scheduled,) = functions(mod)
    assert "stof_test" in scheduled.script() and "global_symbol" not in scheduled.attrs
    assert tuned.scheduled == 1 and not tuned.notes
    executable = tvm.compile(mod, TARGET)
    x = np.random.default_rng(0).standard_normal((8, 32)).astype("float32")
    out = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(x)).numpy()
    expected = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5)


def test_what_the_log_does_not_know_stays_as_it_is():
    with TARGET:
        mod = unscheduled(module())
    other = primfunc_workload(functions(mod)[0].with_attr("another", 1))
    tuned = TunedChoices(Log(other, trace_of(other)), TARGET)
    tvm.ir.assert_structural_equal(ApplyTuningRecords(tuned)(mod), mod)


def test_a_record_of_the_default_schedule_leaves_it_to_the_rules():
    with TARGET:
        mod = unscheduled(module())
    workload = primfunc_workload(functions(mod)[0])
    tuned = TunedChoices(Log(workload, [[], []], trace_of(workload)), TARGET)
    tvm.ir.assert_structural_equal(ApplyTuningRecords(tuned)(mod), mod)
    assert tuned.scheduled == 0


def test_a_trace_that_does_not_apply_is_skipped_with_a_note():
    with TARGET:
        mod = unscheduled(module())
    workload = primfunc_workload(functions(mod)[0])
    wrong = json.loads(json.dumps(trace_of(workload)).replace("T_softmax_norm", "no_such_block"))
    tuned = TunedChoices(Log(workload, wrong, trace_of(workload, "second")), TARGET)
    (scheduled,) = functions(ApplyTuningRecords(tuned)(mod))
    assert "second" in scheduled.script() and bool(scheduled.attrs["tirx.is_scheduled"])
    (note,) = tuned.notes
    assert note.startswith("log:1 no longer fits: ")


def test_scheduled_functions_are_left_alone():
    with TARGET:
        mod = unscheduled(module())
    workload = primfunc_workload(functions(mod)[0])
    done = tvm.IRModule({name: f.with_attr("tirx.is_scheduled", True) for name, f in mod.functions_items()})
    tuned = TunedChoices(Log(workload, trace_of(workload)), TARGET)
    tvm.ir.assert_structural_equal(ApplyTuningRecords(tuned)(done), done)
