"""Sums of few terms in a group, all written out, so that their loads are under way together.

Longer sums and other reductions have a kernel of their own (fusion/reduce).
"""

import math
from functools import cache

from tir_kernels.fusion.group.problem import REDUCTIONS, GroupProblem, Value

SUMS = ("sum", "mean")
MAX_SUMMED = 32  # terms of a sum
MAX_SUMMED_ACROSS = 16  # along the last dimension, where neighbouring lanes read no neighbours
MAX_WRITTEN = 1024  # operators, each counted as often as sums repeat it


def terms_of(problem: GroupProblem, value: Value) -> int:
    """The terms of a reduction."""
    shape = problem.value(value.arguments[0]).shape
    return math.prod(shape[int(axis)] for axis in value.numbers)


def refusal_of_sums(problem: GroupProblem) -> str | None:
    """Why a group's reductions are not written out, or None."""
    for value in problem.values:
        if value.operator not in REDUCTIONS:
            continue
        rank = len(problem.value(value.arguments[0]).shape)
        if value.operator not in SUMS:
            return f"{value.operator} is no operator of elementwise groups"
        if value.dtype == "bool" or value.operator == "mean" and "float" not in value.dtype:
            return f"a {value.operator} of {value.dtype}"
        if problem.value(value.arguments[0]).dtype != value.dtype:
            return f"a {value.operator} of {problem.value(value.arguments[0]).dtype} to {value.dtype}"
        most = MAX_SUMMED_ACROSS if rank - 1 in map(int, value.numbers) else MAX_SUMMED
        if terms_of(problem, value) > most:
            return f"a {value.operator} of more than {most} terms"
    if (count := sum(repeats(problem).values())) > MAX_WRITTEN:
        return f"{count} operators, those that are summed counted for each term; at most {MAX_WRITTEN} are written"
    return None


@cache
def repeats(problem: GroupProblem) -> dict[int, int]:
    """How often the code of each computed value is written: once for each term of the sums that read it."""
    times = dict.fromkeys(range(len(problem.sources) + len(problem.values)), 1)
    for number in range(len(times) - 1, len(problem.sources) - 1, -1):
        value = problem.computed(number)
        for argument in value.arguments:
            terms = terms_of(problem, value) if value.operator in REDUCTIONS else 1
            times[argument] = max(times[argument], times[number] * terms)
    return {number: count for number, count in times.items() if number >= len(problem.sources)}
