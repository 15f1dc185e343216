"""Spreading a budget: against every combination, and the bound that the docstring states."""

import itertools
import random

import pytest

from stof_tvm.errors import InputError
from stof_tvm.masks.quality.budget import allocate


def best(losses, costs, budget):
    sums = []
    for chosen in itertools.product(*(range(len(cost)) for cost in costs)):
        if sum(cost[n] for cost, n in zip(costs, chosen)) <= budget:
            sums.append(sum(loss[n] for loss, n in zip(losses, chosen)))
    return min(sums)


@pytest.mark.parametrize("seed", range(60))
def test_near_the_best_of_all_combinations(seed):
    rng = random.Random(seed)
    choices = rng.randint(1, 4)
    losses = [[rng.choice([rng.random(), 0.5]) for _ in range(rng.randint(1, 4))] for _ in range(choices)]
    costs = [[rng.choice([rng.random(), 1.0, 0.25]) for _ in loss] for loss in losses]
    budget = sum(map(min, costs)) + rng.random() * choices / 2
    chosen = allocate(losses, costs, budget)
    assert sum(cost[n] for cost, n in zip(costs, chosen)) <= budget + 1e-12
    found, least = sum(loss[n] for loss, n in zip(losses, chosen)), best(losses, costs, budget)
    assert least - 1e-12 <= found <= least + max(max(loss) - min(loss) for loss in losses)


def test_everything_where_there_is_enough():
    assert allocate([[3.0, 1.0, 0.0], [2.0, 0.5]], [[1, 2, 9], [1, 3]], 12) == [2, 1]
    assert allocate([[3.0, 1.0, 0.0], [2.0, 0.5]], [[1, 2, 9], [1, 3]], 4) == [1, 0]
    # An option above the hull is taken where what is left allows no better one.
    assert allocate([[10.0, 8.9, 0.0]], [[0, 1, 4]], 3) == [1]


def test_dearer_options_that_lose_more_are_never_taken():
    assert allocate([[1.0, 2.0, 0.5]], [[1, 2, 3]], 2) == [0]


def test_too_little():
    with pytest.raises(InputError, match="a budget of 1 is less than the cheapest options' sum, 3"):
        allocate([[1.0], [1.0]], [[1], [2]], 1)
