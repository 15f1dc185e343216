"""The result of matching a segment with the problems of the kernel templates."""

from dataclasses import dataclass

from tvm import relax

from tir_kernels.problems.kind import Problem


class NoProblem(Exception):
    """The reason why a segment is no problem of the templates."""


@dataclass(frozen=True)
class SegmentMatch:
    """A problem, and the expressions of the segment that are its arguments.

    Attributes
    ----------
    problem : Problem
        What the segment computes.
    inputs : tuple of relax.Expr
        The problem's inputs, in its order, up to reshapes and casts: parameters and constants of the segment, views of
        them, and constants made for it.
    outputs : tuple of relax.Var
        The segment's variables that hold the problem's outputs, up to a reshape.
    """

    problem: Problem
    inputs: tuple[relax.Expr, ...]
    outputs: tuple[relax.Var, ...]
