"""Tensor parallelism: "main" becomes the program of one rank, a smaller one with all-reduces.

    y = relu(x @ w1 + b1) @ w2 + b2     becomes     y = all_reduce(relu(x @ w1[:, mine] + b1[mine]) @ w2[mine]) + b2
    logits = y @ w3                     becomes     logits = all_gather(y @ w3[:, mine])

Of two ranks each may get the other's term instead and add them, where the operators behind a sum are computed anyway:

    y = all_reduce(term) + b2           becomes     y = (term + exchange(term)) + b2

Preconditions: every attention is a call of the composite, masks that depend on no input are constants, weights are
constants, and "main" is one dataflow block; before projections are merged and attention is rewritten.  Results are
whole on every rank.  What is divided is what `Regions` finds by the operators' meaning; the rest every rank computes
whole.  A divided attention has `stof.first_head` and `stof.all_heads`, so that a given mask is that of its own heads.

The module attribute `SHARDED` is JSON: how many ranks there are, attentions and products with what was done, the
all-reduces, which must be the same on all ranks, results that are gathered, and {parameter: [axis, sizes]} of the
states that are divided.
"""

import json
import math

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import emit_attention, match_attention
from relax_passes.ir.bindings import SAME_ELEMENTS, dtype_of, operator, shape_of
from relax_passes.ir.constant_arrays import array_of
from relax_passes.ir.rebuild import rebuild
from relax_passes.parallel.placement import Ranks, Shard
from relax_passes.parallel.regions import Regions
from relax_passes.parallel.rules import GATHERED, PARTIAL, RESULT, sliced_at, split_at, tensors_of
from tir_kernels.scatter import ScatterArguments, scatter

SHARDED = "stof.sharded"

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="ShardTensors")
class ShardTensors:
    """Make "main" the program of one of `ranks`."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def transform_module(self, mod, _ctx):
        regions = Regions(mod, self.ranks.count, gathers=bool(self.ranks.all_gather))
        emitter = _Emitter(mod, regions, self.ranks)
        parameters = {
            parameter: relax.Var(parameter.name, relax.TensorType(emitter.local_shape(parameter), dtype_of(parameter)))
            for parameter in mod["main"].params
            if parameter in regions.shards
        }
        mod = rebuild(mod, emitter.replace, parameters) if regions.slots or regions.shards else mod
        return mod.with_attr(SHARDED, json.dumps(_described(regions, emitter, self.ranks)))


def _described(regions: Regions, emitter: "_Emitter", ranks: Ranks) -> dict:
    products = [
        [shape_of(regions.bindings.values[var].args[0])[-1], shape_of(var)[-1], columns]
        for var, columns in regions.products
    ]
    gathers = [[*shape_of(var), dtype_of(var)] for var in regions.gathered]
    sums = [[list(shape_of(x)), dtype_of(x)] for x in emitter.sums]
    states = {
        x.name: [shard.axis, shard.sizes] for x, shard in regions.shards.items() if x not in regions.bindings.values
    }
    return {
        "ranks": ranks.count,
        "sites": regions.sites,
        "products": products,
        "all_reduces": sums,
        "states": states,
        "gathers": gathers,
    }


class _Emitter:
    """Emits a rank's calls."""

    def __init__(self, mod, regions: Regions, ranks: Ranks):
        self.mod, self.regions, self.ranks = mod, regions, ranks
        self.bindings, self.shards = regions.bindings, regions.shards
        self.parts: dict[tuple, relax.Expr] = {}  # (constant or variable, Shard) -> the rank's part of it
        self.sums: list[relax.Var] = []

    def replace(self, builder, var, new):
        """The rank's expression for a variable of the old "main"; None where it stays as it is."""
        value, slots = self.bindings.values[var], self.regions.slots.get(var)
        if slots is None:  # whole, or a field of a divided tuple
            return None
        operands = [self._operand(builder, x, slots[n], new) for n, x in enumerate(tensors_of(value))]
        if (call := match_attention(self.mod, value)) is not None:
            return self._attention(builder, call, operands)
        if (made := self.regions.scatter(value)) is not None:
            return self._scatter(builder, made, operands)
        result = self._call(value, slots, operands)
        if slots[RESULT] == GATHERED:
            return self._gathered(builder, builder.emit(result))
        if slots[RESULT] != PARTIAL:
            return result
        term = builder.emit(result)
        self.sums.append(term)
        if not self.ranks.exchange:
            return relax.call_dps_packed(self.ranks.all_reduce, (term,), out_ty=term.ty)
        other = builder.emit(relax.call_dps_packed(self.ranks.exchange, (term,), out_ty=term.ty))
        return op.add(*((term, other) if self.ranks.rank == 0 else (other, term)))

    def _gathered(self, builder, part) -> relax.Expr:
        """The columns of all ranks, side by side, from a rank's part (…, n)."""
        shape, count = shape_of(part), self.ranks.count
        every = relax.TensorType((count, *shape), dtype_of(part))
        parts = builder.emit(relax.call_dps_packed(self.ranks.all_gather, (part,), out_ty=every))
        if math.prod(shape[:-1]) > 1:
            parts = builder.emit(op.permute_dims(parts, [*range(1, len(shape)), 0, len(shape)]))
        return op.reshape(parts, (*shape[:-1], count * shape[-1]))

    def local_shape(self, var) -> tuple[int, ...]:
        """The shape of a rank's part of a divided variable."""
        return self.shards[var].local_shape(shape_of(var), self.ranks.count)

    def _operand(self, builder, expr, shard, new):
        if shard is None or self.shards.get(expr) == shard:
            return new(expr)
        if (expr, shard) not in self.parts:
            if isinstance(expr, GenericConst):
                array = array_of(expr)
                index = [slice(None)] * array.ndim
                taken = [array[(*index[: shard.axis], slice(*range_))] for range_ in shard.ranges(self.ranks)]
                part = relax.const(_joined(taken, shard.axis), dtype_of(expr))
            else:
                whole = new(expr)
                slices = [
                    builder.emit(op.strided_slice(whole, [shard.axis], [first], [end]))
                    for first, end in shard.ranges(self.ranks)
                ]
                part = slices[0] if len(slices) == 1 else builder.emit(op.concat(slices, shard.axis))
            self.parts[expr, shard] = part
        return self.parts[expr, shard]

    def _call(self, call: relax.Call, slots, operands: list) -> relax.Expr:
        """The call on a rank's operands, with the shapes and places in it that belong to whole tensors made smaller."""
        name, shard, count = operator(call), slots[RESULT], self.ranks.count
        if name in SAME_ELEMENTS:
            return op.reshape(operands[0], shard.local_shape(shape_of(call), count))
        if name == "broadcast_to":
            return op.broadcast_to(operands[0], shard.local_shape(shape_of(call), count))
        if name == "split" and split_at(call)[0] == shard.axis:
            return op.split(operands[0], [first // count for first, _ in split_at(call)[1][1:]], shard.axis)
        if name == "strided_slice" and shard.axis in (taken := sliced_at(call)):
            first, end, _ = taken[shard.axis]
            taken[shard.axis] = first // count, end // count, 1
            begins, ends, steps = zip(*taken.values())
            return op.strided_slice(operands[0], list(taken), begins, ends, steps)
        rest = iter(operands)
        arguments = []
        for argument in call.args:
            if isinstance(argument, relax.Tuple) and name == "concat":
                arguments.append(relax.Tuple([next(rest) for _ in argument.fields]))
            elif isinstance(getattr(argument, "ty", None), relax.TensorType):
                arguments.append(next(rest))
            else:
                arguments.append(argument)
        return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)

    def _scatter(self, builder, made: ScatterArguments, operands: list) -> relax.Expr:
        """The call of a scatter's kernel for a rank's operands."""
        x, index, update = map(shape_of, operands)
        made = made._replace(shape=list(x), index_shape=list(index), update_shape=list(update))
        kernel = builder.add_func(scatter(*made), "scatter")
        return relax.call_tir(kernel, operands, relax.TensorType(x, made.dtype))

    def _attention(self, builder, call, operands: list) -> relax.Var:
        """The attention of the rank's heads."""
        q, k, v, *rest = operands
        names = ("mask", "bias", "sink", "positions")
        given = dict(zip([name for name in names if getattr(call, name) is not None], rest, strict=True))
        heads = shape_of(call.q)[1]
        return emit_attention(
            builder,
            *(q, k, v),
            **given,
            scale=call.scale,
            softcap=call.softcap,
            causal=call.causal,
            first_row=call.first_row,
            empty_rows=call.empty_rows,
            site=call.site,
            spelling=call.spelling,
            heads=(Shard(1, (heads,)).ranges(self.ranks)[0][0], heads),
        )


def _joined(parts: list[np.ndarray], axis: int) -> np.ndarray:
    return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts, axis)
