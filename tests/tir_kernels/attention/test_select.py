"""Choices of attention kernels where some times were measured."""

from dataclasses import replace

import pytest

from stof_tvm import masks
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig
from tir_kernels.attention.cpu import row_wise as row_wise_cpu
from tir_kernels.attention.mask_forms import MaskForms
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.select import attention_parts, choose
from tir_kernels.attention.warp_specialized import cost as warp_specialized_cost
from tir_kernels.attention.warp_specialized import kernel as warp_specialized
from tir_kernels.target import parse_target
from tir_kernels.tuned_config import TunedConfig

TARGET = parse_target("cuda -arch=sm_80")
STRIDED = masks.strided(64)
PROBLEM = AttentionProblem(8, 12, 12, 2048, 2048, 64, 64, "float16", 0.125)
WHOLE, NEAR, FAR = (BlockWiseConfig(64, 32, 4, 3, stride) for stride in (1, 1, 64))


class Times:
    """A log of the whole's and the parts' microseconds, where not None."""

    def __init__(self, whole=None, near=None, far=None):
        self.times = {(False, False): (WHOLE, whole), (True, False): (NEAR, near), (False, True): (FAR, far)}

    def attention(self, problem, mask):
        config, us = self.times[problem.gives_lse, problem.continues]
        return None if us is None else TunedConfig(block_wise_cuda, config, us, "NVIDIA H200", "log:1")


def test_without_a_log_or_a_record_the_model_decides():
    window = masks.sliding_window(16)
    for tuned in (None, Times()):
        assert choose(PROBLEM, window, TARGET, tuned=tuned) == choose(PROBLEM, window, TARGET)


def test_a_record_goes_before_the_model():
    window = masks.sliding_window(16)
    choice = choose(PROBLEM, window, TARGET, tuned=Times(whole=17.5))
    assert choice.config == WHOLE != choose(PROBLEM, window, TARGET).config
    assert choice.measured_us == 17.5 and choice.reason == "tuned: 17.5 µs on NVIDIA H200 (log:1)"
    assert choice.mask == window.compile(2048, 2048, (64, 32))
    assert choice.predicted_us == pytest.approx(choose(PROBLEM, window, TARGET).predicted_us, rel=0.5)


def test_parts_of_a_mask():
    (near, near_mask), (far, far_mask) = attention_parts(PROBLEM, STRIDED, TARGET)
    assert near.gives_lse and far.continues
    assert not (near_mask.dense(2048) & far_mask.dense(2048)).any()
    for mask in (None, masks.sliding_window(16)):
        assert attention_parts(PROBLEM, mask, TARGET) == []
    assert attention_parts(PROBLEM, STRIDED, parse_target("llvm")) == []


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("length", [2048, 3000, 4096])
def test_parts_are_those_that_the_model_chooses_kernels_for(length, arch):
    """Measured times of parts and predicted ones may be of one choice."""
    target, given = parse_target(f"cuda -arch={arch}"), replace(PROBLEM, q_len=length, kv_len=length)
    mask = STRIDED | masks.sliding_window(30)
    parts, launches = attention_parts(given, mask, target), choose(given, mask, target).launches
    assert [problem for problem, _ in parts] == [launch.problem for launch in launches] and len(parts) == 2
    for (_, part), launch in zip(parts, launches):
        block = launch.config.block_m, launch.config.block_n
        assert part.compile(length, length, block, launch.config.token_stride) == launch.mask


def test_blocks_of_tokens_that_are_apart_are_predicted_as_such(monkeypatch):
    """A time factor for them decides, and reading an earlier part takes time."""
    target, dilated = parse_target("cuda -arch=sm_90a"), masks.dilated_window(512, 4)
    choice = choose(PROBLEM, dilated, target)
    assert choice.template is warp_specialized and choice.config.token_stride == 4
    assert choice.predicted_us == warp_specialized.predict_us(PROBLEM, choice.config, target, forms_of(choice, dilated))
    monkeypatch.setattr(warp_specialized_cost, "APART", 10.0)
    assert choose(PROBLEM, dilated, target).template is not warp_specialized


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_reading_an_earlier_part_takes_time(arch):
    target = parse_target(f"cuda -arch={arch}")
    choice, (_, far) = choose(PROBLEM, STRIDED, target).launches[-1], attention_parts(PROBLEM, STRIDED, target)[1]
    problems = replace(choice.problem, continues=False), choice.problem
    alone, after = (choice.template.predict_us(p, choice.config, target, forms_of(choice, far)) for p in problems)
    assert 1.05 < after / alone < 1.6


def forms_of(choice, mask) -> MaskForms:
    return MaskForms(choice.problem, mask, choice.config.token_stride)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_mask_is_not_divided_where_a_bias_may_fill_a_row(arch):
    """If all scores of a row are -1e9, their log-sum-exp is -1e9, however many they are."""
    target = parse_target(f"cuda -arch={arch}")
    for shape in ((1, 1, 1, 2048), (8, 1, 2048, 2048)):
        filled = replace(PROBLEM, bias_shape=shape)
        assert attention_parts(filled, STRIDED, target) == []
        for tuned in (None, Times(near=1.0, far=1.0)):
            assert len(choose(filled, STRIDED, target, tuned=tuned).launches) == 1
    # Blocks of tokens that are apart are one part.
    dilated = masks.dilated_window(512, 4)
    assert choose(replace(PROBLEM, bias_shape=(1, 1, 1, 2048)), dilated, target).config.token_stride == 4


@pytest.mark.parametrize(
    "times, launches",
    [
        (Times(whole=50.0, near=20.0, far=29.0), [NEAR, FAR]),
        (Times(whole=48.0, near=20.0, far=29.0), [WHOLE]),
    ],
)
def test_whole_or_parts_by_what_was_measured(times, launches):
    choice = choose(PROBLEM, STRIDED, TARGET, tuned=times)
    assert [launch.config for launch in choice.launches] == launches
    assert choice.measured_us == (49.0 if len(launches) == 2 else 48.0)


def test_whole_or_parts_by_the_model_where_a_time_is_missing():
    modelled = choose(PROBLEM, STRIDED, TARGET)
    assert len(modelled.launches) == 2
    choice = choose(PROBLEM, STRIDED, TARGET, tuned=Times(whole=1.0, far=29.0))
    near, far = choice.launches
    assert near.config == modelled.launches[0].config and far.config == FAR
    assert choice.measured_us is None
    assert choice.predicted_us > near.predicted_us
    assert "in two parts: predicted" in choice.reason and "tuned: 29.0 µs" in choice.reason


def test_other_templates():
    class RowWise:
        def __init__(self, template):
            self.template = template

        def attention(self, problem, mask):
            config = self.template.configs(problem, target)[-1]
            return TunedConfig(self.template, config, 3.0, "here", "log:1")

    target = TARGET
    decoding = AttentionProblem(1, 4, 4, 1, 4096, 64, 64, "float16", 0.125)
    choice = choose(decoding, None, TARGET, tuned=RowWise(row_wise_cuda))
    assert choice.template is row_wise_cuda and choice.predicted_us > 0
    target = parse_target("llvm")
    small = AttentionProblem(1, 2, 2, 64, 64, 16, 16, "float32", 0.25)
    choice = choose(small, masks.causal(), target, tuned=RowWise(row_wise_cpu))
    assert choice.template is row_wise_cpu and choice.config == row_wise_cpu.configs(small, target)[-1]
