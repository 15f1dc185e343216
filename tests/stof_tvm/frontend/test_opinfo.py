"""A part of the importer's comparison with PyTorch on its own samples: `python -m tests.stof_tvm.frontend.opinfo`."""

import json

import pytest
import torch

from docs import operators as page
from tests.stof_tvm.frontend.opinfo.checking import Outcome, check, difference
from tests.stof_tvm.frontend.opinfo.samples import DTYPES, operators

SAMPLE = """
add bool, sub float16, mul int64, div_floor_rounding float32, remainder int8, pow float32, lt uint8, ne float32,
bitwise_right_shift int32, clamp int64, exp int64, round float32, sign uint8, nn_functional_elu bfloat16, log1p float32,
fmax float32, sum bool, var float32, argmax float32, topk float32, median float32, cummax float32,
logcumsumexp float32, nn_functional_avg_pool2d float32, nn_functional_max_pool2d float16,
nn_functional_interpolate_nearest float32, nn_functional_interpolate_bilinear float32,
nn_functional_conv_transpose2d float32, nn_functional_layer_norm bfloat16, nn_functional_pad_constant bool,
grid_sampler_2d float16, nn_functional_grid_sample float32
"""


@pytest.fixture(scope="module")
def table():
    return operators()


@pytest.mark.parametrize("case", [case.strip() for case in SAMPLE.replace("\n", " ").split(",")])
def test_operator_means_what_pytorch_means(table, case):
    name, dtype = case.split()
    outcome = check(table[name], DTYPES[dtype], cap=3)
    assert outcome.counts["right"] and set(outcome.counts) <= {"right", "refused"}, outcome.lines


def test_difference_sees_nan_infinities_integers_and_dtypes():
    nan, inf = float("nan"), float("inf")
    assert not difference(torch.tensor([1.0, nan, inf]), torch.tensor([1.0 + 1e-7, nan, inf]))
    assert difference(torch.tensor([1.0, 0.0]), torch.tensor([1.0, nan]))
    assert difference(torch.tensor([1.0, 3e38]), torch.tensor([1.0, inf]))
    assert difference(torch.tensor([1e-8, 1.0]), torch.tensor([2e-8, 1.0])) == ""
    assert difference(torch.tensor([2**53 + 1]), torch.tensor([2**53]))
    assert difference(torch.tensor([1]), torch.tensor([1.0]))


def test_outcome_tells_why_calls_are_refused():
    outcome = Outcome()
    outcome.add(
        "refused", "()", "the model uses operators that have no converter: aten.lgamma.default (in the root module)"
    )
    outcome.add("refused", "()", "aten.pow.Tensor_Tensor in the root module cannot be converted: the power of booleans")
    assert outcome.reasons() == ["aten.lgamma has no converter", "the power of booleans"]


def test_the_page_of_operators_is_current():
    assert page.PAGE.read_text() == page.page(json.loads(page.RESULTS.read_text()))
