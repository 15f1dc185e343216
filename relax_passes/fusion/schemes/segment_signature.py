"""Signatures of segments: operators, shapes and connections, whatever their position in the model."""

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.operators import ATTENTION, OperatorGraph
from relax_passes.ir.bindings import operator

LEAF = "leaf"


def segment_results(graph: OperatorGraph, segment: range) -> list[relax.Var]:
    """The variables of a segment's operators that are read outside it."""
    inside = set(segment)
    return [graph.variables[i] for i in segment if graph.readers[i] - inside or i in graph.results]


def signature(graph: OperatorGraph, segment: range) -> tuple:
    """A value equal for segments of one structure: operators, shapes and connections, whatever the constants.

    For an attention only its result counts, not the kernel.
    """
    outside = {}

    def position(leaf: relax.Var, ty: str):
        """The leaf's position in the segment; for a value from outside, its number among these and its type."""
        i = graph.index.get(leaf)
        if i is not None and i in segment:
            return i - segment.start
        return outside.setdefault(leaf, len(outside)), ty

    operators = []
    for i in segment:
        structure, leaves = _description(graph, i)
        operators.append((structure, tuple(position(*leaf) for leaf in leaves)))
    return tuple(operators), tuple(graph.index[var] - segment.start for var in segment_results(graph, segment))


def _description(graph: OperatorGraph, i: int) -> tuple:
    """An operator's expression with all views that it reads through, and the variables at its leaves with their types.

    It does not depend on the segment that the operator is in, so it is made once.
    """
    if i not in graph.descriptions:
        leaves = []
        var = graph.variables[i]
        if graph.operators[i].kind == ATTENTION:
            leaves += [(graph.variables[j], str(graph.variables[j].ty)) for j in graph.operators[i].inputs]
            structure = ATTENTION, str(var.ty)
        else:
            structure = _describe(graph, graph.bindings.values[var], leaves)
        graph.descriptions[i] = structure, tuple(leaves)
    return graph.descriptions[i]


def _describe(graph: OperatorGraph, expr, leaves: list):
    if isinstance(expr, relax.Var):
        if expr in graph.index or expr not in graph.bindings.values:
            leaves.append((expr, str(expr.ty)))
            return LEAF
        return _describe(graph, graph.bindings.values[expr], leaves)
    if isinstance(expr, relax.Call):
        return operator(expr), str(expr.attrs), tuple(_describe(graph, argument, leaves) for argument in expr.args)
    if isinstance(expr, relax.Tuple):
        return tuple(_describe(graph, field, leaves) for field in expr.fields)
    if isinstance(expr, relax.TupleGetItem):
        return expr.index, _describe(graph, expr.tuple_value, leaves)
    if isinstance(expr, GenericConst):
        return str(expr.ty), graph.bindings.scalar(expr)
    return str(expr)
