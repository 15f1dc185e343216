"""CutViews: a chain of slices and reshapes ends in memory, before its indices grow without end.

Where a reshape parts anew what a slice or a concatenation had cut, no strides lead from its elements to those of its
operand, only quotients.  TVM fuses it with all views before it, and an index has the quotients of all such reshapes
among them, each twice or more.  Two relative shifts (pad, reshape, slice, reshape) that followed one another took a
minute to build, and five never ended.  So the second such reshape becomes a function that nothing is fused with: what
comes before is stored, and the reshape is a view of it.

Preconditions: before `LegalizeOps`; bindings are flat, and each stands behind those that it reads.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import tvm
import tvm_ffi
from tvm import relax, te, topi

from relax_passes.ir.bindings import SAME_ELEMENTS, operator, permutation, static_shape
from relax_passes.ir.strided_views import Strided
from tir_kernels.fusion.group.operators import ELEMENTWISE

MOST = 1  # reshapes of cut elements in one kernel
OPAQUE = 8  # relax's "op_pattern" of functions that are fused with no other
CUTTING = {"strided_slice", "split", "concat", "nn.pad", "broadcast_to"}
MOVING = {"repeat", "tile", "stack", "flip", "take"}  # as if every dimension was cut
FUSED = {*SAME_ELEMENTS, "permute_dims", *CUTTING, *MOVING, *ELEMENTWISE, "astype"}


class Chain(NamedTuple):
    """The views before a value.

    Attributes
    ----------
    reshapes : int
        How many of them are reshapes of cut elements.
    dims : Strided
        The factors of each dimension since the last of these.  Those that a cut left have a stride of their own, so
        that none joins the dimension before it.
    """

    reshapes: int
    dims: Strided


@tvm.transform.module_pass(opt_level=0, name="CutViews")
class CutViews:
    """Store the operands of such reshapes in every Relax function of a module."""

    def transform_module(self, mod, _ctx):
        cut = {}
        for name, func in mod.functions_items():
            if isinstance(func, relax.Function) and (calls := _second_reshapes(func)):
                cut[name] = func, calls
        if not cut:
            return mod
        builder = relax.BlockBuilder()
        changed = {}
        for name, (func, calls) in cut.items():
            stored = {call: _stored(builder, call) for call in calls}
            changed[name] = tvm_ffi.structural_map(func, (relax.Call, lambda x: stored.get(x, x)), order="post")
        mod = mod.clone()
        mod.update(builder.get())
        mod.update(tvm.IRModule(changed))
        return mod


def _second_reshapes(func: relax.Function) -> list[relax.Call]:
    """The reshapes of cut elements that come after `MOST` others, since the last that was stored."""
    chains: dict[relax.Var, Chain] = {}
    strides = itertools.count(-1, -1)
    found = []
    for block in getattr(func.body, "blocks", ()):
        for binding in block.bindings:
            chain = _chain(binding.value, chains, strides)
            if chain is not None and chain.reshapes > MOST:
                found.append(binding.value)
                chain = _stored_chain(binding.value)
            if chain is not None:
                chains[binding.var] = chain
    return found


def _chain(value: relax.Expr, chains: dict[relax.Var, Chain], strides: Iterator[int]) -> Chain | None:
    """The chain that ends in a value; None where its operands are stored whatever they are, or a length is symbolic.

    `chains` are those of variables before it.  `strides` gives numbers that are no stride of another dimension.
    """
    name = operator(value)
    shape = static_shape(value)
    if isinstance(value, relax.TupleGetItem):
        name, operands = "split", [value.tuple_value]
    elif name in FUSED:
        operands = [x for x in relax.analysis.free_vars(value) if name == "split" or static_shape(x) is not None]
    else:
        return None
    before = [chain for x in operands if (chain := chains.get(x) or _stored_chain(x)) is not None]
    if not before:
        return None
    longest = max(before, key=lambda chain: chain.reshapes)
    if shape is None:  # of a split, whose fields are cut
        return longest
    if name in SAME_ELEMENTS:
        return _reshaped(longest, shape)
    if name in MOVING:
        return Chain(longest.reshapes, Strided([[(n, next(strides))] for n in shape]))
    if name == "permute_dims":
        return Chain(longest.reshapes, longest.dims.permute(permutation(value)))
    return Chain(longest.reshapes, _cut(longest.dims, shape, strides))


def _reshaped(chain: Chain, shape: tuple[int, ...]) -> Chain:
    """The chain behind a reshape; one of whole elements in memory renames their dimensions, however it parts them."""
    if chain == _whole(_extents(chain.dims)):
        return _whole(shape)
    dims = chain.dims.reshape(shape)
    return Chain(chain.reshapes + 1, Strided.contiguous(shape)) if dims is None else Chain(chain.reshapes, dims)


def _stored_chain(x: relax.Expr) -> Chain | None:
    """That of a value in memory."""
    shape = static_shape(x)
    return None if shape is None else _whole(shape)


def _whole(shape: Iterable[int]) -> Chain:
    return Chain(0, Strided.contiguous(shape))


def _extents(dims: Strided) -> list[int]:
    return [math.prod(n for n, _ in dim) for dim in dims.dims]


def _cut(dims: Strided, shape: tuple[int, ...], strides: Iterator[int]) -> Strided:
    """The dimensions of a value of this shape, those of other extents than its operand's cut."""
    factors = [[(1, 0)]] * (len(shape) - len(dims.dims)) + dims.dims
    extents = _extents(Strided(factors))
    return Strided([dim if n == m else [(n, next(strides))] for dim, n, m in zip(factors, shape, extents, strict=True)])


def _stored(builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """The same reshape, by a function that is fused with no other."""
    x = te.placeholder(static_shape(call.args[0]), str(call.ty.dtype))
    kernel = te.create_prim_func([x, topi.reshape(x, static_shape(call))]).with_attr("op_pattern", OPAQUE)
    name = builder.add_func(kernel.without_attr("global_symbol"), "stored_reshape")
    return builder.normalize(relax.call_tir(name, [call.args[0]], call.ty))
