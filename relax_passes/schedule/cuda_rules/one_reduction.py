"""What the rules for reductions share: the look at a function that is one reduction of elementwise expressions."""

from typing import Any, NamedTuple

from tvm import s_tir
from tvm.s_tir.dlight.analysis import normalize_prim_func
from tvm.s_tir.dlight.base import try_inline


class OneReduction(NamedTuple):
    """A function with its elementwise blocks inlined into one reduction.

    `kinds` has a letter for each of the `loops` around the `block`: "S" for a dimension that stays, "R" for one that is
    reduced.
    """

    schedule: s_tir.Schedule
    block: Any
    loops: list
    kinds: str


def one_reduction(func) -> OneReduction | None:
    """The function as one reduction; None where it is anything else."""
    schedule = s_tir.Schedule(func)
    blocks = normalize_prim_func(schedule)
    if not blocks:
        return None
    *others, last = try_inline(schedule, blocks)
    kinds = "".join(iteration.kind for iteration in last.iters)
    loops = list(schedule.get_loops(last.block_rv))
    if others or not {"R"} <= set(kinds) <= {"S", "R"} or len(loops) != len(kinds):
        return None
    return OneReduction(schedule, last.block_rv, loops, kinds)
