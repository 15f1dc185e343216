"""Masks whose kept distances have a common divisor, and what the model makes of them."""

import pytest

from stof_tvm import masks
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import choose
from tir_kernels.masks.token_strides import TokenStride, find_token_stride
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_80")


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize(
    "mask, expected",
    [
        (masks.strided(32), TokenStride(31, 32)),
        (masks.dilated_window(20, 3), TokenStride(0, 3)),
        (masks.dilated_window(10, 2) & masks.causal(), TokenStride(0, 2)),
        (masks.per_head([masks.dilated_window(10, 2), masks.dilated_window(15, 4)]), TokenStride(0, 2)),
        (masks.sliding_window(20), None),
        (masks.sliding_window(1), None),
        (masks.causal(), None),
        (masks.longformer(), None),
        (masks.vertical_slash([3, 77], [0, 5]), None),
        (masks.from_tensor(masks.causal().dense(8) & False), None),
    ],
    ids=repr,
)
def test_stride_that_is_found(mask, expected, length):
    length = 8 if "from_tensor" in repr(mask) else length
    assert find_token_stride(mask.compile(length, length)) == expected


def problem(length, batch=8):
    return AttentionProblem(batch, 12, 12, length, length, 64, 64, "float16", 0.125)


def test_strided_mask_is_computed_in_two_parts():
    mask = masks.strided(64)
    choice = choose(problem(4096), mask, TARGET)
    near, far = choice.launches
    assert near.problem.gives_lse and not near.problem.continues and near.mask.token_stride == 1
    assert far.problem.continues and far.mask.token_stride == far.config.token_stride == 64
    assert choice.density == pytest.approx(mask.density(4096))
    assert choice.scheduled_density < 0.1 < mask.compile(4096).block_density
    assert not (near.mask.to_dense() & far.mask.to_dense()).any()
    assert "in order" in choice.reason and "tokens 64 apart" in choice.label


def test_dilated_mask_is_one_part_of_tokens_apart():
    (only,) = choose(problem(4096), masks.dilated_window(64, 2), TARGET).launches
    assert only.config.token_stride == only.mask.token_stride == 2


def test_usual_order_where_two_launches_would_take_longer():
    assert len(choose(problem(128, batch=1), masks.strided(11), TARGET).launches) == 1
