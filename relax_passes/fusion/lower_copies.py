"""Lower copies: a view that no kernel reads in place becomes one kernel that copies, however many views it is made of.

Preconditions: after `LowerSegments`, for CUDA; "main" is one dataflow block.  Views that only rename dimensions cost
nothing and stay.  Chains of the others (transposes, slices, splits, broadcasts, concatenations), read by a kernel or
returned, become one call of the elementwise group's kernel each.  Small ones whose operands are there before the first
of them share a call, as launches are most of their time.
"""

import math
from typing import Any

import tvm
from tvm import relax

from relax_passes.fusion.matching.group import match_copy
from relax_passes.fusion.matching.segment_match import NoProblem, SegmentMatch
from relax_passes.fusion.operators import VIEWS
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.fusion.group import group

SMALL = 1 << 20  # bytes of copies that share a call


@tvm.transform.module_pass(opt_level=0, name="LowerCopies")
class LowerCopies:
    """Give every copy of "main" that the group's kernel computes a call of it; the others stay as they are."""

    def __init__(self, target: tvm.target.Target):
        self.target = target

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        closed = ClosedExpressions(bindings).closed_vars
        copies = {}
        for var in _materialized(bindings, closed):
            if (match := self._match(bindings, closed, [var])) is not None:
                copies[var] = match
        joined = self._joined(bindings, closed, copies)
        kernels: dict = {}
        calls: dict = {}  # the first variable of a match -> its call, of several results

        def replace(builder, var, new):
            if var not in joined:
                return None
            match, place = joined[var]
            if len(match.outputs) == 1:
                return self._call(builder, match, new, kernels)
            if place == 0:
                calls[var] = builder.emit(self._call(builder, match, new, kernels))
            return relax.TupleGetItem(calls[match.outputs[0]], place)

        return rebuild(mod, replace) if copies else mod

    def _match(self, bindings: Bindings, closed: set, variables: list) -> SegmentMatch | None:
        """The group that copies these views, if the kernel computes it."""
        try:
            match = match_copy(bindings, closed, variables)
        except NoProblem:
            return None
        return match if group.unsupported(match.problem, self.target) is None else None

    def _joined(self, bindings: Bindings, closed: set, copies: dict) -> dict:
        """For each copy, (match, the number of its result): its own, or one that it shares with others."""
        places = {var: place for place, var in enumerate(bindings.values)}
        last_input = lambda match: max((places.get(x, -1) for x in match.inputs), default=-1)
        matches: list[SegmentMatch] = []
        for var in sorted(copies, key=places.__getitem__):
            match = copies[var]
            if matches and last_input(match) < places[matches[-1].outputs[0]]:
                both = [*matches[-1].outputs, var]
                more = self._match(bindings, closed, both) if _size(both) <= SMALL else None
                if more is not None:
                    matches[-1] = more
                    continue
            matches.append(match)
        return {var: (match, place) for match in matches for place, var in enumerate(match.outputs)}

    def _call(self, builder, match: SegmentMatch, new, kernels: dict) -> relax.Expr:
        problem: Any = match.problem
        if problem not in kernels:
            config = group.configs(problem, self.target)[0]
            with quick_script():
                kernel = group.instantiate(problem, config, self.target)
            kernels[problem] = builder.add_func(kernel.without_attr("global_symbol"), "fused_group_copy")
        types = [relax.TensorType(shape, dtype) for shape, dtype in problem.outputs]
        return relax.call_tir(kernels[problem], [new(x) for x in match.inputs], types if len(types) > 1 else types[0])


def _size(variables: list) -> int:
    """Bytes of tensors."""
    return sum(math.prod(shape_of(x)) * tvm.DataType(dtype_of(x)).itemsize for x in variables)


def _materialized(bindings: Bindings, closed: set) -> list[relax.Var]:
    """The views that move data and are read by kernels, or returned, directly or renamed."""
    found: dict[relax.Var, None] = {}
    pending = list(bindings.outputs)
    for var in bindings.values:
        if var not in closed and not _is_view(bindings, var):
            pending += bindings.reads[var]
    while pending:
        var = pending.pop()
        if var in closed or var not in bindings.values:
            continue
        if isinstance(bindings.values[var], relax.Tuple):
            pending += bindings.reads[var]
            continue
        inner = bindings.values[var] if isinstance(bindings.values[var], relax.Var) else bindings.same_elements(var)
        if isinstance(inner, relax.Var):
            pending.append(inner)
        elif _is_view(bindings, var):
            found[var] = None
    return list(found)


def _is_view(bindings: Bindings, var) -> bool:
    """Whether a variable is bound to a rearrangement of others."""
    value = bindings.values[var]
    if isinstance(value, relax.Var | relax.Tuple):
        return True
    if isinstance(value, relax.TupleGetItem):
        return bindings.call(value.tuple_value, "split") is not None
    return operator(value) in (*VIEWS, "concat") or operator(value) == "take" and bindings.is_weight(value.args[1])
