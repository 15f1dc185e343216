"""Merge projections: products of one input by several constant weights become one product, its output cut in slices.

    q = x @ wq + bq,  k = x @ wk + bk,  v = x @ wv      becomes      q, k, v = split(x @ [wq wk wv] + [bq bk 0])

Preconditions: after `CanonicalizeAttention`, so that attention is a call of the composite; before
`RewriteMaskedAttention`, which reads the slices in place; "main" is one dataflow block with constants bound.  Weights
are packed here, at compile time, and biases with them; a projection without a bias gets zeros where another has one.

Projections are merged if their results meet first in one attention.  A gate and its values, which meet in a product,
are merged later, where one kernel computes both (`merge_gates`).
"""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import match_attention
from relax_passes.fusion.merging.projection import Projection, match_projection
from relax_passes.ir.bindings import Bindings, dtype_of, shape_of
from relax_passes.ir.constant_arrays import array_of, constant_of
from relax_passes.ir.rebuild import rebuild

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="MergeProjections")
class MergeProjections:
    """Merge the projections of "main" that meet in one attention."""

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        groups = {}
        for var in bindings.values:
            projection = match_projection(bindings, var)
            if projection is not None:
                meeting = _meeting(mod, bindings, projection.result)
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


def _meeting(mod, bindings, result) -> frozenset:
    """The attentions that are the first to read a projection's result; none if a product or the caller reads it."""
    attentions = set()
    pending, seen = [result], {result}
    while pending:
        var = pending.pop()
        if var in bindings.outputs:
            return frozenset()
        for reader in bindings.readers[var]:
            if match_attention(mod, bindings.values[reader]) is not None:
                attentions.add(reader)
            elif bindings.call(reader, "matmul") is not None:
                return frozenset()
            elif reader not in seen:
                seen.add(reader)
                pending.append(reader)
    return frozenset(attentions)


def _emit_merged(builder, x, projections: list[Projection]) -> relax.Var:
    """The tuple of the projections' results, slices of one product."""
    transposed, dtype = projections[0].transposed, dtype_of(projections[0].result)
    sizes = [shape_of(p.result)[-1] for p in projections]
    weight = _constant([array_of(p.weight) for p in projections], 0 if transposed else 1, dtype)
    packed = builder.emit(op.matmul(x, builder.emit(op.permute_dims(weight)) if transposed else weight))
    if any(p.bias is not None for p in projections):
        zero = projections[0].weight.value.numpy().dtype.type(0)
        biases = [np.full(n, zero) if p.bias is None else p.bias.value.numpy() for p, n in zip(projections, sizes)]
        packed = builder.emit(op.add(packed, _constant(biases, 0, dtype)))
    return builder.emit(op.split(packed, np.cumsum(sizes[:-1]).tolist(), axis=-1))


def _constant(arrays, axis, dtype) -> GenericConst:
    return constant_of(np.concatenate(arrays, axis), dtype)
