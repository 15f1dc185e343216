"""The rule by which results are right."""

import pytest
import torch

from stof_tvm.verification import comparison
from stof_tvm.verification.comparison import difference, judge

NAN, INF = float("nan"), float("inf")
Y = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


def never():
    raise AssertionError("asked for without a doubt")


def test_roundings_are_not_in_doubt():
    verdict = judge(Y * (1 + 1e-7), Y, never, never)
    assert verdict.is_right and 0 < verdict.error < 1e-6 and "same dtype" in verdict.rule


def test_a_small_row_beside_a_large_one_is_looked_at_closely():
    expected = torch.stack([Y[0] * 1e6, Y[1]])
    wrong = torch.stack([Y[0] * 1e6, Y[1] + 1e-3])
    assert not difference(wrong, expected).is_close and difference(expected, expected).is_close


def test_in_doubt_pytorchs_own_error_decides():
    wider = Y.double()
    rounded = Y + 1e-2  # PyTorch's
    assert judge(Y + 3e-2, rounded, lambda: wider, never).is_right
    verdict = judge(Y + 9e-2, rounded, lambda: wider, lambda: None)
    assert not verdict.is_right and "PyTorch's own 0.01" in verdict.rule
    assert judge(Y + 9e-2, rounded, lambda: wider, lambda: rounded + 5e-2).is_right  # a rounding moves it as far


@pytest.mark.parametrize(("dtype", "times"), [(torch.float16, 2.0), (torch.bfloat16, 2.0), (torch.float32, 4.0)])
def test_the_multiple_of_each_dtype(dtype, times):
    exact = torch.full((64,), 1.0, dtype=torch.float64)
    own, slack = 0.25, comparison.ROUNDING[dtype]
    theirs = (exact + own).to(dtype)
    inside, outside = ((exact + times * own + step).to(dtype) for step in (-4 * slack, 6 * slack))
    assert judge(inside, theirs, lambda: exact, lambda: None).is_right
    assert not judge(outside, theirs, lambda: exact, lambda: None).is_right


def test_an_infinity_is_what_either_computation_gives():
    """gelu(inf) is NaN in PyTorch's vectorised float32 and inf in float64; a NaN is excused by neither."""
    expected, wider = Y.clone(), Y.double()
    expected[0, :3], wider[0, :3] = torch.tensor([NAN, INF, NAN]), torch.tensor([INF, NAN, -INF]).double()
    for value, is_right in ((torch.tensor([INF, INF, -INF]), True), (torch.tensor([INF, NAN, -INF]), False)):
        actual = expected.clone()
        actual[0, :3] = value
        assert judge(actual, expected, lambda: wider, lambda: None).is_right == is_right


def test_nan_and_infinities_are_in_the_same_places():
    expected = Y.clone()
    expected[0, :3] = torch.tensor([NAN, INF, -INF])
    assert judge(expected.clone(), expected, never, never).is_right
    for place, value in (((0, 0), 1.0), ((0, 1), -INF), ((0, 1), NAN), ((3, 3), NAN), ((3, 3), INF)):
        actual = expected.clone()
        actual[place] = value
        verdict = judge(actual, expected, lambda: None, lambda: None)
        assert not verdict.is_right and "1 elements are NaN or infinite" in verdict.rule


def test_differences_that_overflow_are_measured_in_float64():
    expected = torch.full((4, 8), 3e38)
    found = difference(-expected, expected)
    assert found.error == pytest.approx(6e38) and found.elsewhere == 0 and not found.is_close
    assert not judge(-expected, expected, lambda: expected.double(), lambda: None).is_right


def test_integers_are_equal_but_for_near_ties():
    expected = torch.arange(12).reshape(3, 4)
    actual = expected.clone()
    actual[1, 1] += 1
    assert judge(expected.clone(), expected, never, never).is_right
    assert not judge(actual, expected, lambda: expected, lambda: expected).is_right
    other = expected.clone()
    other[2, 2] += 1
    assert judge(actual, expected, lambda: expected, lambda: other).is_right
    assert not judge(actual > 3, expected > 4, lambda: None, lambda: None).is_right


@pytest.mark.parametrize("is_choice", [True, False])
def test_a_number_that_is_computed_may_be_as_far_off_as_a_rounding_moves_it(is_choice):
    """A rounding that moves a count by one allows no error of a hundred; where it moves a place, it does."""
    expected = torch.tensor(4000)
    for off, allowed in ((1, True), (4, True), (100, is_choice)):
        verdict = judge(expected + off, expected, lambda: expected, lambda: expected + 1, is_choice=lambda: is_choice)
        assert verdict.is_right == allowed
    assert not judge(expected + 1, expected, lambda: expected, lambda: expected, is_choice=lambda: is_choice).is_right
    assert judge(expected, expected, never, never, is_choice=never).is_right


def test_large_integers_are_compared_exactly():
    expected = torch.tensor([2**53, -(2**62)])
    assert judge(expected.clone(), expected, never, never).is_right
    assert not judge(expected + 1, expected, lambda: expected, lambda: None).is_right


def test_other_shapes_and_dtypes_are_wrong():
    assert "of shape (8,)" in judge(Y[0], Y, never, never).rule
    assert "float16" in judge(Y.half(), Y, never, never).rule


def test_large_tensors_are_compared_in_parts(monkeypatch):
    monkeypatch.setattr(comparison, "CHUNK", 16)
    actual = Y.clone()
    actual[5, 7] += 1
    found = difference(actual, Y)
    assert found.error == pytest.approx(1.0) and not found.is_close and found.scale == Y.abs().max()


@pytest.mark.parametrize("shape", [(), (0, 4), (3, 0)])
def test_scalars_and_nothing(shape):
    assert judge(torch.ones(shape), torch.ones(shape), never, never).is_right


def test_complex_numbers():
    assert judge(torch.view_as_complex(Y.view(6, 4, 2)), torch.view_as_complex(Y.view(6, 4, 2)), never, never).is_right


def test_products_in_tf32_are_judged_by_the_roundings_of_float16():
    expected = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    actual = expected + 1e-3 * expected.abs().amax(-1, keepdim=True)
    assert not judge(actual, expected, lambda: expected.double(), lambda: None).is_right
    verdict = judge(actual, expected, lambda: None, lambda: None, precision=torch.float16)
    assert verdict.is_right and verdict.rule == "as PyTorch in tf32"
    far = expected + 0.1 * expected.abs().amax(-1, keepdim=True)
    assert not judge(far, expected, lambda: expected.double(), lambda: None, precision=torch.float16).is_right
    integers = torch.arange(4)
    assert not judge(integers + 1, integers, lambda: None, lambda: None, precision=torch.float16).is_right
