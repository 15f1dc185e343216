"""What traces decided, as plain data."""

import json

from tvm.s_tir import Schedule

from tir_kernels.fusion.problem import RowProblem
from tir_kernels.tuning.decisions import decisions_key, decisions_of
from tir_kernels.tuning.workload import fusion_workload

WORKLOAD = fusion_workload(RowProblem(8, 16, "float16"))


def annotated(decision):
    sch = Schedule(WORKLOAD, debug_mask="none")
    block = sch.get_sblock("out")
    sch.annotate(block, "stof.template", "cuda gemm")
    sch.annotate(block, "stof.stages", sch.sample_categorical([2, 3, 5], [0.4, 0.3, 0.3], decision))
    return sch.trace


def tiled(factor):
    sch = Schedule(WORKLOAD, debug_mask="none")
    loop, _ = sch.get_loops(sch.get_sblock("out"))
    sch.split(loop, [None, sch.sample_categorical([2, 4], [0.5, 0.5], [2, 4].index(factor))])
    return sch.trace


def test_template_and_values():
    assert decisions_of(annotated(2)) == {"template": "cuda gemm", "stages": 5}


def test_a_trace_and_its_json_decided_the_same():
    for trace in (annotated(1), tiled(2)):
        as_stored = json.loads(json.dumps(trace.as_json(), default=lambda x: getattr(x, "value", x)))
        assert decisions_key(decisions_of(as_stored)) == decisions_key(decisions_of(trace))


def test_traces_of_other_rules_are_known_by_what_they_do():
    two, four = decisions_of(tiled(2)), decisions_of(tiled(4))
    assert list(two) == ["trace"] and two != four
    assert two == decisions_of(tiled(2))
