"""The result of matching a segment with the problems of the kernel templates."""

from dataclasses import dataclass

import numpy as np
from tvm import relax

from tir_kernels.fusion.problem import GATE_COLUMNS
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
    gate : (range, range), optional
        Of a gated product: the columns of the model's w, and of its bias, that are the gate's and the values'.  Both
        are constants, which are arranged as the problem wants them.
    """

    problem: Problem
    inputs: tuple[relax.Expr, ...]
    outputs: tuple[relax.Var, ...]
    gate: tuple[range, range] | None = None

    def arranged(self, array: np.ndarray, axis: int) -> np.ndarray:
        """A constant of the model, of any shape and dtype, in the order of a gated problem's columns along `axis`."""
        assert self.gate is not None
        groups = [np.asarray(part).reshape(-1, 1, GATE_COLUMNS) for part in self.gate]
        return np.take(array, np.concatenate(groups, 1).ravel(), axis)
