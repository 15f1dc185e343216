"""Records of a log that passes ask for: the fastest that fits, and notes of those that do not."""

from dataclasses import dataclass, replace

import pytest

from relax_passes import tuned_choices
from relax_passes.tuned_choices import TunedChoices
from stof_tvm import masks
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm import gemv as gemv_cuda
from tir_kernels.fusion.problem import GemmProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest
from tir_kernels.tuning.problem_json import problem_to_json
from tir_kernels.tuning.template_space import fusion_spaces
from tir_kernels.tuning.workload import mask_of, problem_of

TARGET = parse_target("cuda -arch=sm_80")
PROBLEM = GemmProblem(4, 64, "float16", (Step("gelu"),), k=512)


@dataclass(frozen=True)
class Record:
    decisions: dict
    us: float = 5.0
    gpu: str = "NVIDIA H200"
    location: str = "log:1"


class Log:
    """Records by what their workload's problem and mask are."""

    def __init__(self, records):
        self.records = records
        self.asked = []

    def may_hold(self, problem):
        return True

    def ranked(self, workload, gpu):
        self.asked.append(gpu)
        return self.records.get((problem_of(workload), mask_of(workload)), [])


def decisions(template, position):
    (space,) = (s for s in fusion_spaces(PROBLEM, TARGET) if s.template is template)
    return space.decisions_for(space.configs[position])


def test_the_first_record_names_template_and_configuration():
    log = Log({(PROBLEM, None): [Record(decisions(gemm_cuda, 5)), Record(decisions(gemv_cuda, 0), 6.0)]})
    tuned = TunedChoices(log, TARGET, "NVIDIA H200")
    found = tuned.fusion(PROBLEM)
    assert (found.template, found.config) == (gemm_cuda, gemm_cuda.configs(PROBLEM, TARGET)[5])
    assert found.reason == "tuned: 5.0 µs on NVIDIA H200 (log:1)"
    assert tuned.fusion(PROBLEM) is found and log.asked == ["NVIDIA H200"]
    assert tuned.fusion(replace(PROBLEM, m=5)) is None and not tuned.notes


@pytest.mark.parametrize(
    "misfit, why",
    [
        ({"template": "cuda hgemm", "tile": 3}, "there is no template 'cuda hgemm'"),
        ({"template": "cuda gemv", "columns": 8, "warps": 64, "unroll": 1}, "is no configuration of cuda gemv"),
        ({"template": "cuda gemv", "colour": 1}, "has no field colour"),
        ({"trace": "00"}, "there is no template 'None'"),
    ],
)
def test_a_record_that_no_longer_fits_is_skipped_with_a_note(misfit, why):
    log = Log({(PROBLEM, None): [Record(misfit, 1.0, location="log:7"), Record(decisions(gemv_cuda, 1), 6.0)]})
    tuned = TunedChoices(log, TARGET)
    assert tuned.fusion(PROBLEM).us == 6.0
    (note,) = tuned.notes
    assert note.startswith("log:7 no longer fits: ") and why in note


def test_attention_is_known_by_its_mask():
    problem = AttentionProblem(1, 2, 2, 256, 256, 64, 64, "float16", 0.125)
    window = masks.sliding_window(16)
    (space,) = attention_spaces(problem, window, TARGET)
    record = Record(space.decisions_for(space.configs[3]))
    tuned = TunedChoices(Log({(problem, mask_digest(problem, window)): [record]}), TARGET)
    assert tuned.attention(problem, masks.from_tensor(window.dense(256))).config == space.configs[3]
    assert tuned.attention(problem, masks.sliding_window(17)) is None
    assert tuned.attention(problem, None) is None


def test_no_workload_is_made_for_what_was_never_tuned(monkeypatch):
    """A workload takes a tenth of a second, and a model's fusion schemes ask for hundreds of problems."""

    class Holds(Log):
        def may_hold(self, problem):
            return problem == problem_to_json(PROBLEM)

    attention = AttentionProblem(1, 2, 2, 256, 256, 64, 64, "float16", 0.125)
    tuned = TunedChoices(Holds({(PROBLEM, None): [Record(decisions(gemm_cuda, 5))]}), TARGET)
    made, make = [], tuned_choices.fusion_workload
    monkeypatch.setattr(tuned_choices, "fusion_workload", lambda problem: made.append(problem) or make(problem))
    monkeypatch.setattr(tuned_choices, "attention_workload", lambda *key: pytest.fail("made"))
    assert tuned.fusion(replace(PROBLEM, m=5)) is None and tuned.attention(attention, masks.causal()) is None
    assert tuned.fusion(PROBLEM) is not None and made == [PROBLEM]
