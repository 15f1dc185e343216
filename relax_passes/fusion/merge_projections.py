"""Merge projections: products of one input by several constant weights become one product, its output cut in slices.

    q = x @ wq + bq,  k = x @ wk + bk,  v = x @ wv      becomes      q, k, v = split(x @ [wq wk wv] + [bq bk 0])

Preconditions: after `CanonicalizeAttention`, so that attention is a call of the composite; before
`RewriteMaskedAttention`, which reads the slices in place; "main" is one dataflow block with constants bound.  Weights
are packed here, at compile time, and biases with them; a projection without a bias gets zeros where another has one.

Projections are merged if their results meet first in one attention.  Projections that meet in another product, such as
the gate and the input of a gated MLP, are merged only on request: as two products they have activation and gate as
epilogues, which is faster unless one kernel computes both halves.
"""

from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import Bindings, dtype_of, permutation, shape_of
from relax_passes.ir.rebuild import rebuild

op = relax.op


@dataclass(frozen=True)
class Projection:
    """x @ w [+ bias], bound to `result`; `weight` is w (k, n), or (n, k) if `transposed`."""

    x: relax.Var
    weight: GenericConst
    transposed: bool
    bias: GenericConst | None
    result: relax.Var


@tvm.transform.module_pass(opt_level=0, name="MergeProjections")
class MergeProjections:
    """Merge the projections of "main".

    Parameters
    ----------
    gated : bool
        Whether to merge also projections that meet in a product rather than in an attention.
    """

    def __init__(self, gated: bool = False):
        self.gated = gated

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        groups = {}
        for var in bindings.values:
            projection = _match_projection(bindings, var)
            if projection is not None:
                meeting = _meeting(mod, bindings, projection.result, self.gated)
                key = projection.x, projection.transposed, dtype_of(projection.result), meeting
                groups.setdefault(key, []).append(projection)
        merged = {
            projection.result: (projections, index)
            for (*_, meeting), projections in groups.items()
            if meeting and len(projections) > 1
            for index, projection in enumerate(projections)
        }
        if not merged:
            return mod
        slices = {}

        def replace(builder, var, new):
            if var not in merged:
                return None
            projections, index = merged[var]
            if projections[0].result not in slices:
                slices[projections[0].result] = _emit_merged(builder, new(projections[0].x), projections)
            return relax.TupleGetItem(slices[projections[0].result], index)

        return rebuild(mod, replace)


def _match_projection(bindings: Bindings, var) -> Projection | None:
    """The projection whose product is bound to `var`, or None."""
    product = bindings.call(var, "matmul")
    if product is None or bindings.values[var] is not product or not isinstance(product.args[0], relax.Var):
        return None
    x, weight = product.args
    transpose = bindings.call(weight, "permute_dims")
    if transpose is not None and permutation(transpose) == [1, 0]:
        weight = transpose.args[0]
    weight = bindings.value(weight)
    is_matrix = isinstance(weight, GenericConst) and len(weight.ty.shape) == 2
    if not is_matrix or len({dtype_of(value) for value in (x, weight, product)}) != 1:
        return None
    readers = bindings.readers[var]
    bias = _bias(bindings, var, readers[0]) if len(readers) == 1 and var not in bindings.outputs else None
    return Projection(x, weight, transpose is not None, bias, var if bias is None else readers[0])


def _bias(bindings, product, reader) -> GenericConst | None:
    """The constant vector that `reader` adds to the product; None if `reader` does anything else."""
    total = bindings.call(reader, "add")
    for operand in total.args if total is not None else ():
        value = bindings.value(operand)
        is_constant = isinstance(value, GenericConst) and dtype_of(value) == dtype_of(product)
        if is_constant and shape_of(value) == shape_of(product)[-1:]:
            return value
    return None


def _meeting(mod, bindings, result, gated: bool) -> frozenset:
    """The attentions, or else the products if `gated`, that are the first to read a projection's result."""
    attentions, products = set(), set()
    pending, seen = [result], {result}
    while pending:
        var = pending.pop()
        if var in bindings.outputs:
            return frozenset()
        for reader in bindings.readers[var]:
            value = bindings.values[reader]
            if match_attention(mod, value) is not None:
                attentions.add(reader)
            elif bindings.call(reader, "matmul") is not None:
                products.add(reader)
            elif reader not in seen:
                seen.add(reader)
                pending.append(reader)
    if products:
        return frozenset(products) if gated and not attentions else frozenset()
    return frozenset(attentions)


def _emit_merged(builder, x, projections: list[Projection]) -> relax.Var:
    """The tuple of the projections' results, slices of one product."""
    transposed, dtype = projections[0].transposed, dtype_of(projections[0].result)
    sizes = [shape_of(p.result)[-1] for p in projections]
    weight = _constant([p.weight.value.numpy() for p in projections], 0 if transposed else 1, dtype)
    packed = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight)) if transposed else weight))
    if any(p.bias is not None for p in projections):
        zero = projections[0].weight.value.numpy().dtype.type(0)
        biases = [np.full(n, zero) if p.bias is None else p.bias.value.numpy() for p, n in zip(projections, sizes)]
        packed = builder.emit(op.add(packed, _constant(biases, 0, dtype)))
    return builder.emit(op.split(packed, np.cumsum(sizes[:-1]).tolist(), axis=-1))


def _constant(arrays, axis, dtype) -> GenericConst:
    return relax.const(np.concatenate(arrays, axis), dtype)
