"""Guards against overflow are exported as clamps of each element; other branches on values are refused."""

import pytest
import torch

import stof_tvm
from stof_tvm.errors import ExportError
from stof_tvm.frontend.exportable.overflow_guards import OverflowGuards

MOST = torch.finfo(torch.float16).max


class Guarded(torch.nn.Module):
    """x * 2, guarded in one of the ways that models write."""

    def __init__(self, guard):
        super().__init__()
        self.guard = guard

    def forward(self, x):
        return self.guard(x * 2) + 1


def not_all_finite(x):
    if x.dtype == torch.float16 and not torch.isfinite(x).all():
        most = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-most, max=most)
    return x


def any_infinite(x):
    if torch.isinf(x).any():
        x = x.clip(-MOST + 1000, MOST - 1000)
    return x


@pytest.mark.parametrize("guard", [not_all_finite, any_infinite])
def test_finite_elements_stay_and_infinite_ones_are_the_largest(guard):
    engine = stof_tvm.build(Guarded(guard), "llvm", torch.ones(4, dtype=torch.float16))
    nan, inf = float("nan"), float("inf")
    for values in ([1, 2, 32750, -32750], [inf, 3, -inf, nan]):
        x = torch.tensor(values, dtype=torch.float16)
        expected = (x * 2).clamp(-MOST, MOST) + 1
        torch.testing.assert_close(engine(x), expected, rtol=0, atol=0, equal_nan=True)
        assert not (x * 2).isfinite().all() or torch.equal(engine(x), guard(x * 2) + 1)


def something_else(x):
    return x if torch.isfinite(x).all() else torch.zeros_like(x)


def clamped_to_one(x):
    return x.clamp(-1, 1) if torch.isinf(x).any() else x


def clamps_another(x):
    return (x + 1).clamp(-MOST, MOST) if torch.isinf(x).any() else x


def returns(x):
    if not torch.isfinite(x).all():
        return x
    return x.exp()


def asks_for_nan(x):
    return x.clamp(-MOST, MOST) if torch.isnan(x).any() else x


def all_are_infinite(x):
    return x.clamp(-MOST, MOST) if torch.isinf(x).all() else x


@pytest.mark.parametrize(
    "guard, words",
    [
        (something_else, "does something else than clamp it: zeros_like follows"),
        (clamped_to_one, "does something else than clamp it: clamp follows"),
        (clamps_another, "does something else than clamp it"),
        (returns, "does something else than clamp it: __add__|does something else than clamp it: add"),
        (asks_for_nan, "data-dependent"),
        (all_are_infinite, "data-dependent"),
    ],
)
def test_other_branches_are_refused(guard, words):
    with pytest.raises(ExportError, match=words):
        stof_tvm.build(Guarded(guard), "llvm", torch.ones(4, dtype=torch.float16))


def test_a_question_at_the_end_is_refused():
    with pytest.raises(Exception, match="and then returns"):
        with OverflowGuards():
            bool(torch.isfinite(torch.ones(2)).all())


def test_outside_of_an_export_nothing_changes():
    assert bool(torch.isfinite(torch.ones(2)).all()) and not bool(torch.isinf(torch.ones(2)).any())
