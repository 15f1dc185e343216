"""Signatures of segments: operators, shapes and connections, whatever their position in the model."""

import sys
from typing import NamedTuple

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.operators import ATTENTION, OperatorGraph
from relax_passes.ir.bindings import operator

LEAF = "leaf"


def segment_results(graph: OperatorGraph, segment: range) -> list[relax.Var]:
    """The variables of a segment's operators that are read outside it."""
    return [graph.variables[i] for i in _results(graph, segment)]


def _results(graph: OperatorGraph, segment: range) -> list[int]:
    """The operators of a segment that are read outside it: by the function's results, or by an operator behind it."""
    return [i for i in segment if i in graph.results or max(graph.readers[i], default=-1) >= segment.stop]


def signature(graph: OperatorGraph, segment: range) -> tuple:
    """A value equal for segments of one structure: operators, shapes and connections, whatever the constants.

    For an attention only its result counts, not the kernel.
    """
    structures = tuple(_description(graph, i).structure for i in segment)
    connections, results = _connections(graph, segment)
    return tuple(zip(structures, connections)), results


def segment_key(graph: OperatorGraph, segment: range) -> tuple:
    """A value that is equal where `signature` is, to look a segment up: it is hashed and compared faster."""
    return tuple(_description(graph, i).name for i in segment), *_connections(graph, segment)


class _Description(NamedTuple):
    """An operator's expression with all views that it reads through, its name, and the leaves.

    The name is a string that is the same object for equal structures.  A leaf is (operator's number, or variable that
    none is bound to; its type).
    """

    structure: tuple
    name: str
    leaves: tuple[tuple[int | relax.Var, str], ...]


def _connections(graph: OperatorGraph, segment: range) -> tuple:
    """Where each operator's leaves come from, and which operators give the segment's results.

    A leaf is its position in the segment; for a value from outside, its number among these and its type.
    """
    outside: dict[int | relax.Var, int] = {}
    start = segment.start

    def position(leaf: int | relax.Var, ty: str):
        if isinstance(leaf, int) and leaf >= start:  # an operator reads earlier ones
            return leaf - start
        return outside.setdefault(leaf, len(outside)), ty

    connections = tuple(tuple(position(*leaf) for leaf in _description(graph, i).leaves) for i in segment)
    return connections, tuple(i - start for i in _results(graph, segment))


def _description(graph: OperatorGraph, i: int) -> _Description:
    """The description of an operator.  It does not depend on the segment that it is in, so it is made once."""
    if i not in graph.descriptions:
        leaves = []
        var = graph.variables[i]
        if graph.operators[i].kind == ATTENTION:
            leaves += [(graph.variables[j], str(graph.variables[j].ty)) for j in graph.operators[i].inputs]
            structure = ATTENTION, str(var.ty)
        else:
            structure = _describe(graph, graph.bindings.values[var], leaves)
        numbered = tuple((graph.index.get(leaf, leaf), ty) for leaf, ty in leaves)
        graph.descriptions[i] = _Description(structure, sys.intern(repr(structure)), numbered)
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
