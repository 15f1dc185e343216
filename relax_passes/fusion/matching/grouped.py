"""Segments that are a grouped product: sorted rows times the weight of each row's group, then what needs no operand.

After the product there may be a gate, f(g) * v of two halves of its columns, if the weights are constants; then
activations, numbers that multiply, and bounds.  Rows of no group go through them as zeros.
"""

from dataclasses import replace

from relax_passes.fusion.matching.chain import Chain
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.ir.operators.grouped_products import GROUPED, problem_of_call
from tir_kernels.errors import StofError
from tir_kernels.fusion.grouped.problem import GroupedProblem


def match_grouped(graph: OperatorGraph) -> SegmentMatch:
    """The product and what follows it.  Raises NoProblem with the reason where other operators are beside it."""
    first, *others = (operator.name for operator in graph.operators)
    if first not in GROUPED or GROUPED.keys() & others:
        beside = sorted({first, *others} - GROUPED.keys())
        raise NoProblem(f"a grouped product beside {' and '.join(beside) or 'another'}")
    return GroupedChain(graph).match()


class GroupedChain(Chain):
    """A chain that begins with a grouped product."""

    def match(self) -> SegmentMatch:
        """The segment's problem and what its inputs and outputs are; NoProblem says why there is none."""
        match = super().match()
        return replace(match, inputs=(*match.inputs, *self.indices))

    def _product(self, var):
        call = self.bindings.value(var)
        try:
            self.grouped: GroupedProblem = problem_of_call(call)
        except StofError as error:
            raise NoProblem(str(error)) from None
        for argument in call.args:
            self._outside(argument)
        self.inputs, self.indices = list(call.args[:2]), list(call.args[2:])
        self.m, self.n, self.current = self.grouped.m, self.grouped.n, var
        self.gemm = {"k": self.grouped.k, "w_layout": self.grouped.w_layout}

    def _problem(self, dtype: str, keeps_sum: bool):
        if self.norm is not None or len(self.inputs) > 2:
            raise NoProblem("a grouped product beside a norm or an operator with an operand of its own")
        gate = self.gemm.get("gate")
        if dtype == "float32" and (gate is not None or self.steps):
            raise NoProblem("a grouped product of float32 is alone: gates and steps are for half precision")
        return replace(self.grouped, n=self.n, gate=gate, steps=tuple(self.steps))
