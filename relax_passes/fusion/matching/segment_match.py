"""The result of matching a segment with the problems of the kernel templates."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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
    gate : (sequence of int, sequence of int), optional
        Of a gated product: the columns of the model's w, and of its bias, that are the gate's and the values'.  Both
        are constants, which are arranged as the problem wants them.
    """

    problem: Problem
    inputs: tuple[relax.Expr, ...]
    outputs: tuple[relax.Var, ...]
    gate: tuple[Sequence[int], Sequence[int]] | None = None

    @cached_property
    def order(self) -> np.ndarray:
        """The columns of the model's w, int64 (2 n,), in the order of a gated problem's."""
        assert self.gate is not None
        groups = [np.asarray(part).reshape(-1, 1, GATE_COLUMNS) for part in self.gate]
        return np.concatenate(groups, 1).ravel()

    @property
    def is_arranged(self) -> bool:
        """Whether the model's columns are in this order."""
        return bool((self.order == np.arange(len(self.order))).all())

    def arranged(self, array: np.ndarray, axis: int) -> np.ndarray:
        """A constant of the model, of any shape and dtype, in the order of a gated problem's columns along `axis`."""
        return np.take(array, self.order, axis)
