"""One option for each of many choices, so that a sum of costs stays within a budget and a sum of losses is small."""

from collections.abc import Sequence

from tir_kernels.errors import InputError


def allocate(losses: Sequence[Sequence[float]], costs: Sequence[Sequence[float]], budget: float) -> list[int]:
    """The number of the option of each choice; their costs sum to at most `budget`.

    Each choice begins with its cheapest option.  Then the step that lowers the loss most for its cost is taken, again
    and again, along the lower convex hull of each choice's options; that is the best of all sums whose cost the steps
    reach exactly.  What is left of the budget goes to the single options that still lower the loss.  So the sum of
    losses is above the least possible one by less than the gain of the first step that did not fit.

    Raises InputError if the cheapest options cost more than the budget.
    """
    chosen = [min(range(len(cost)), key=lambda n: (cost[n], loss[n])) for loss, cost in zip(losses, costs, strict=True)]
    left = budget - sum(cost[n] for cost, n in zip(costs, chosen, strict=True))
    if left < 0:
        raise InputError(f"a budget of {budget:.4g} is less than the cheapest options' sum, {budget - left:.4g}")
    steps = []
    for choice, (loss, cost) in enumerate(zip(losses, costs, strict=True)):
        hull = _hull(loss, cost, chosen[choice])
        for before, after in zip(hull, hull[1:], strict=False):
            gain = (loss[before] - loss[after]) / (cost[after] - cost[before])
            steps.append((-gain, choice, after, cost[after] - cost[before]))
    stopped = set()
    for _, choice, after, price in sorted(steps, key=lambda step: (step[0], step[1])):
        if choice not in stopped and price <= left:
            chosen[choice], left = after, left - price
        else:
            stopped.add(choice)
    return _filled(losses, costs, chosen, left)


def _hull(loss: Sequence[float], cost: Sequence[float], first: int) -> list[int]:
    """Options from the cheapest on, of which each next one lowers the loss by less for its cost."""
    hull = [first]
    for n in sorted(range(len(cost)), key=lambda n: (cost[n], loss[n])):
        if loss[n] >= loss[hull[-1]] or cost[n] <= cost[hull[-1]]:
            continue
        while len(hull) > 1:
            a, b = hull[-2:]
            if (loss[a] - loss[b]) * (cost[n] - cost[b]) > (loss[b] - loss[n]) * (cost[b] - cost[a]):
                break
            hull.pop()
        hull.append(n)
    return hull


def _filled(losses, costs, chosen: list[int], left: float) -> list[int]:
    """Options that fit into what is left, the largest gain first."""
    while True:
        gains = [
            (losses[choice][now] - losses[choice][n], choice, n)
            for choice, now in enumerate(chosen)
            for n in range(len(costs[choice]))
            if costs[choice][n] - costs[choice][now] <= left and losses[choice][n] < losses[choice][now]
        ]
        if not gains:
            return chosen
        _, choice, n = max(gains)
        left -= costs[choice][n] - costs[choice][chosen[choice]]
        chosen[choice] = n
