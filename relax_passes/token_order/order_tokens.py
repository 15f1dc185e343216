"""Let the tokens of attentions stand in the order in which their masks have fuller blocks.

Preconditions: after `FoldMasks`.  Attentions whose given masks want the same order of as many tokens are taken
together.  Where a region (regions.py) leads from one of them to the next, its values are computed in that order: a take
along the tokens where they enter it, the inverse one where they leave it.  What depends on constants only, such as
rotary tables, is moved when it is folded.  The attentions' attribute `stof.reordered` says that their masks are to be
those of the other order.  Where there is no region nothing changes, and a note to the user says why.
"""

from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import NOTES, REORDERED, match_attention
from relax_passes.ir.bindings import Bindings, shape_of
from relax_passes.ir.rebuild import new_main, substitute
from relax_passes.token_order.regions import MixedTokens, Region, is_plain
from tir_kernels.errors import UnsupportedError

MOVED = "tokens stand in the order of the mask's tiles, from before the first to behind the last attention with it"
KEPT = "tokens stay in the model's order, in which the mask has fewer blocks to skip: {}"


@tvm.transform.module_pass(opt_level=0, name="OrderTokens")
class OrderTokens:
    """Move the tokens of masked attentions to the order that the masks want, once before and once behind them.

    Parameters
    ----------
    order_for : callable
        Maps a site's path and sizes (B, H, Sq, Skv) to the order that the mask given for the site wants, int64
        (tokens,), or to None.
    is_masked : callable
        Whether there is a given mask or a rule for the site at a path.
    """

    def __init__(self, order_for: Callable, is_masked: Callable[[str], bool]):
        self.order_for, self.is_masked = order_for, is_masked

    def transform_module(self, mod, _ctx):
        for order, sites in self._groups(mod):
            members = [var for var, call in _attentions(mod) if call.site in sites]
            try:
                region = Region(mod, members, self.is_masked)
            except (MixedTokens, UnsupportedError) as reason:
                mod = _noted(mod, sites, KEPT.format(reason))
            else:
                mod = _noted(_moved(mod, region, order, sites), sites, MOVED)
        return mod

    def _groups(self, mod) -> list[tuple[np.ndarray, list[str]]]:
        """The paths of the attentions that want the same order."""
        groups: dict[bytes, tuple[np.ndarray, list[str]]] = {}
        for _, call in _attentions(mod):
            if not is_plain(call):
                continue
            batch, heads, q_len, kv_len = call.mask_sizes
            all_heads = heads if call.heads is None else call.heads[1]
            order = self.order_for(call.site, (batch, all_heads, q_len, kv_len)) if q_len == kv_len else None
            if order is not None:
                groups.setdefault(order.tobytes(), (order, []))[1].append(call.site)
        return list(groups.values())


def _noted(mod, sites: list[str], note: str):
    """The module with a note for each site."""
    attrs = mod.attrs or {}
    before = list(attrs[NOTES]) if NOTES in attrs else []
    return mod.with_attr(NOTES, [*before, *([site, note] for site in sites)])


def _attentions(mod) -> list:
    """(variable, call) of each attention of "main" whose lengths are known."""
    found = []
    for var, value in Bindings(mod["main"]).values.items():
        if (call := match_attention(mod, value)) is not None:
            try:
                shape_of(call.q), shape_of(call.k)
            except UnsupportedError:
                continue
            found.append((var, call))
    return found


def _moved(mod, region: Region, order: np.ndarray, sites: list[str]):
    """The module with the region's values in the order."""
    there, back = relax.const(order, "int64"), relax.const(np.argsort(order), "int64")
    function = mod["main"]

    def body(builder):
        plain: dict = {parameter: parameter for parameter in function.params}
        moved: dict = {}
        constants: dict = {}

        def take(x, index, axis):
            return builder.emit(relax.op.take(x, index, axis=axis, mode="clip"))

        def in_model_order(x):
            if x not in plain:
                plain[x] = take(moved[x], back, region.axes[x])
            return plain[x]

        def in_new_order(x):
            if x not in moved:
                moved[x] = take(plain[x], there, region.axes[x])
            return moved[x]

        def constant(x, axis):
            if (x, axis) not in constants:
                constants[x, axis] = take(x, there, axis)
            return constants[x, axis]

        for block in function.body.blocks:
            for binding in block.bindings:
                var, value = binding.var, binding.value
                inside = var in region.inside
                read = relax.analysis.free_vars(value)
                names = {x: in_new_order(x) if inside and x in region.axes else in_model_order(x) for x in read}
                new = substitute(value, names)
                if inside:
                    new = _with_constants(new, region.constants.get(var, {}), constant)
                target = moved if inside and var in region.axes else plain
                target[var] = builder.emit(new, var.name)
        result = function.body.body
        return substitute(result, {x: in_model_order(x) for x in relax.analysis.free_vars(result)})

    mod = new_main(mod, body)
    for name, other in mod.functions_items():
        if other.attrs and "stof.site" in other.attrs and str(other.attrs["stof.site"]) in sites:
            mod.update_func(name, other.with_attr(REORDERED, 1))
    return mod


def _with_constants(call, axes: dict, constant: Callable):
    """The call with its constants moved, given the axis of each by its place in the arguments."""
    if not axes:
        return call
    number = 0

    def one(x):
        nonlocal number
        if not isinstance(getattr(x, "ty", None), relax.TensorType | relax.TupleType):
            return x
        at = axes.get(number)
        number += 1
        return constant(x, at) if at is not None and isinstance(x, GenericConst) else x

    args = [relax.Tuple([one(y) for y in x.fields]) if isinstance(x, relax.Tuple) else one(x) for x in call.args]
    return relax.Call(call.op, args, call.attrs, call.ty_args, call.span)
