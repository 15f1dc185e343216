"""The list of all kinds of problems.  The class of a problem decides its kind."""

from functools import cache

from tir_kernels.problems import attention, embedding, gemm, group, grouped, mlp, rotary, rows
from tir_kernels.problems.kind import ProblemKind
from tir_kernels.problems.sorting import merge, sort

KINDS: tuple[ProblemKind, ...] = (rows, gemm, mlp, embedding, rotary, group, grouped, sort, merge, attention)


def kind_of(problem) -> ProblemKind:
    """The kind of a problem; KeyError for anything else."""
    return _by_class(KINDS)[type(problem)]


def problem_classes() -> tuple[type, ...]:
    """The classes of all kinds' problems."""
    return tuple(_by_class(KINDS))


def classes_by_name() -> dict[str, type]:
    """The classes of all problems and of their parts, by the names that JSON texts use."""
    return _by_name(KINDS)


@cache
def _by_class(kinds: tuple[ProblemKind, ...]) -> dict[type, ProblemKind]:
    return {kind.PROBLEM: kind for kind in kinds}


@cache
def _by_name(kinds: tuple[ProblemKind, ...]) -> dict[str, type]:
    return {found.__name__: found for kind in kinds for found in (kind.PROBLEM, *kind.PARTS)}
