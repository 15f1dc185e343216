"""Operators give what they may as well have given, and nothing else."""

import pytest
import torch

from stof_tvm.rules.roundings import OtherRoundings
from stof_tvm.verification.comparison import CLOSE

X = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
ROUNDING = {
    "product": lambda x: x @ x.mT,
    "sum": lambda x: x.abs().sum(-1),
    "in place": lambda x: x.clone().sub_(1.0).exp_(),
    "softmax": lambda x: x.softmax(-1),
    "half": lambda x: x.half() * 3,
}
EXACT = {
    "comparison": lambda x: x > 0,
    "selection": lambda x: torch.where(x > 0, x, -torch.inf).masked_fill(x > 1, 0.0),
    "places": lambda x: x.flip(-1).reshape(8, 20).mT.contiguous(),
    "extremes": lambda x: x.amax(-1),
    "integers": lambda x: (x > 0).cumsum(-1),
    "largest": lambda x: x.topk(3).indices,
}


@pytest.mark.parametrize("name", ROUNDING)
def test_what_rounds_moves_by_no_more_than_is_close(name):
    exact, found = ROUNDING[name](X), []
    for seed in range(2):
        with OtherRoundings(seed):
            found.append(ROUNDING[name](X))
        assert found[-1].dtype == exact.dtype and not torch.equal(found[-1], exact)
        torch.testing.assert_close(found[-1], exact, rtol=3 * CLOSE[exact.dtype], atol=1e-6)
    assert not torch.equal(*found)


@pytest.mark.parametrize("name", EXACT)
def test_what_does_not_round_stays(name):
    with OtherRoundings(0):
        found = EXACT[name](X)
    assert torch.equal(found, EXACT[name](X))


def test_weights_that_underflow_are_not_0_but_those_of_minus_infinity_are():
    scores = torch.tensor([0.0, -200.0, -300.0, -torch.inf])
    for exponential in (lambda x: x.softmax(-1), torch.exp, lambda x: x.clone().exp_()):
        with OtherRoundings(1):
            weights = exponential(scores)
        assert weights[3] == 0 and (weights[1:3] >= 0).all() and weights[1] != weights[2]
        assert (weights[1:3] < 2e-38).all()


def test_scores_of_minus_infinity_stay_so():
    scores = torch.full((64,), -torch.inf)
    with OtherRoundings(0):
        assert torch.equal(scores + 1.0, scores)


def test_any_of_equal_numbers_is_among_the_largest():
    scores, seen = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0, 4.0]]), set()
    for seed in range(20):
        with OtherRoundings(seed):
            values, places = scores.topk(2, dim=-1)
        assert values.tolist() == [[5.0, 1.0], [4.0, 3.0]] and places[:, 0].tolist() == [0, 4] and places[1, 1] == 3
        seen.add(int(places[0, 1]))
    assert seen == {1, 2, 3}
    with OtherRoundings(0):
        assert scores.topk(2, 0, False).indices.shape == (2, 5) and torch.tensor(2.0).topk(1, 0).indices == 0
