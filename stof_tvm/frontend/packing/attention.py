"""Rules of attention among the tokens of a sequence, whole or written out; the documents' mask is given to the engine.

The model's own masks come off: what they say of padding is nothing on a row without padding, and what they say of
positions is part of each document's mask.  A bias that is more than a mask stays.
"""

import functools
import operator
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.fx import Node

from stof_tvm.frontend.packing.dims import BATCH, TOKEN, is_fixed
from stof_tvm.frontend.packing.own_masks import NotAMask, lowest
from stof_tvm.frontend.packing.rewriter import PLACE, WEIGHTS, Attention, Rewriter, Value, arguments
from stof_tvm.masks import Mask, causal

aten = torch.ops.aten


def is_of_positions(rewriter: Rewriter, value: Value) -> bool:
    """Whether a value depends on nothing but positions and the padding mask."""
    return value.origins <= {PLACE, rewriter.own.padding}


def without_mask(rewriter: Rewriter, node: Node) -> Value | None:
    """The scores that a node masks, without that mask; None for a node that does not mask scores."""
    if node.target is aten.add.Tensor:
        pairs = [arguments(node)[:2], arguments(node)[1::-1]] if node.kwargs.get("alpha", 1) == 1 else []
        choices = [(scores, mask, True) for scores, mask in pairs]
    elif node.target is aten.where.self:
        condition, a, b = arguments(node)
        choices = [(a, condition, True)] if _is_lowest(rewriter, b) else []
        choices += [(b, condition, False)] if _is_lowest(rewriter, a) else []
    elif node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        scores, mask, fill = arguments(node)
        choices = [(scores, mask, False)] if _is_lowest(rewriter, fill) else []
    else:
        return None
    for scores, mask, is_kept in choices:
        if not isinstance(scores, Node) or not isinstance(mask, Node):
            continue
        value, masking = rewriter.value(scores), rewriter.value(mask)
        is_score = value.is_pair and not is_of_positions(rewriter, value)
        if is_score and masking.dims[-1:] == ((TOKEN,),) and is_of_positions(rewriter, masking):
            if value.node.meta["val"].dtype != node.meta["val"].dtype or len(value.dims) != node.meta["val"].dim():
                return None
            new = value.node
            try:
                found = _mask(rewriter, node, mask, is_kept)
            except NotAMask as more:
                found = more.mask
                if len(masking.dims) != len(value.dims):
                    return None
                new = rewriter.emit(node, aten.add.Tensor, new, _without_lowest(rewriter, node, masking))
            keeps = (*value.keeps, *([] if found is None else [found]))
            origins = rewriter.origins(node)
            value = replace(value, node=new, keeps=keeps, fill=None, constant=None, origins=origins)
            rewriter.check(node, value)  # a mask of heads must not be one of scores that all heads share
            return value
    return None


def _without_lowest(rewriter: Rewriter, node: Node, bias: Value) -> Node:
    """A bias with 0 instead of numbers so low that they mask."""
    value = bias.node.meta["val"]
    masked = rewriter.emit(node, aten.le.Scalar, bias.node, lowest(value.dtype))
    return rewriter.emit(node, aten.where.ScalarSelf, masked, 0.0, bias.node)


def chosen(rewriter: Rewriter, node: Node) -> Value | None:
    """What `where` gives, if it chooses by the padding mask or positions and a sequence alone has one choice."""
    if node.target is not aten.where.self:
        return None
    condition, kept, other = arguments(node)
    value = rewriter.value(condition)
    if not value.tokens or not is_of_positions(rewriter, value):
        return None
    choice = rewriter.own.only_value(condition)
    if choice is None:
        return None
    kept, other = (kept, other) if choice else (other, kept)
    values = [rewriter.value(x) for x in (condition, kept, other)]
    rank = node.meta["val"].dim()
    value = rewriter.of_rank(node, values[1], rank)
    spread = [rewriter.of_rank(node, x, rank).dims for x in values]
    dims = [next((dim for dim in choices if dim != ()), ()) for choices in zip(*spread)]
    if value.is_sequence or value.node.meta["val"].dtype != node.meta["val"].dtype:
        return None
    new = rewriter.emit(node, aten.expand.default, value.node, rewriter.shape(dims, False))
    fill = values[2].fill if values[0].fill is not None and bool(values[0].fill) != choice else None
    return rewriter.result(node, new, dims, origins=value.origins, fill=fill, keeps=value.keeps)


def _is_lowest(rewriter: Rewriter, x) -> bool:
    """Whether scores that become this number are masked."""
    number = rewriter.value(x).constant if isinstance(x, Node) else x
    dtype = x.meta["val"].dtype if isinstance(x, Node) else None
    return isinstance(number, int | float) and number <= lowest(dtype)


def _mask(rewriter: Rewriter, node: Node, mask: Node, is_kept: bool) -> Mask | None:
    """The model's own mask, of positions; NotAMask for another bias."""
    try:
        if rewriter.own.padding in rewriter.value(mask).origins:
            rewriter.own.check_padding(mask, is_kept)
        return rewriter.own.of_scores(mask, is_kept)
    except ValueError as error:
        raise rewriter.refuse(node, f"of its mask: {error}") from None


def _all(keeps: Iterable[Mask]) -> Mask | None:
    """What all of some masks keep."""
    different = list(dict.fromkeys(keeps))
    return functools.reduce(operator.and_, different) if different else None


def sdpa(rewriter: Rewriter, node: Node) -> Value:
    """scaled_dot_product_attention: q (*, H, S, D), k (*, Hkv, S, D), v (*, Hkv, S, Dv)."""
    given = rewriter.given(node)
    q, k, v = (rewriter.value(given[name]) for name in ("query", "key", "value"))
    for name, x in (("queries", q), ("keys", k), ("values", v)):
        in_front = any(TOKEN in dim for dim in x.dims[:-2])
        if len(x.dims) < 2 or x.dims[-2] != (TOKEN,) or in_front or not is_fixed(x.dims[-1]) or x.is_sequence:
            raise rewriter.refuse(node, f"its {name} are not one for each token")
    keeps: list[Mask] = [causal()] if given["is_causal"] else []
    bias = given.get("attn_mask")
    if bias is not None:
        value = rewriter.value(bias)
        if value.is_sequence or value.dims[-1] != (TOKEN,):
            raise rewriter.refuse(node, "its mask is not one of keys")
        keeps += value.keeps
        if is_of_positions(rewriter, value):
            try:
                found, bias = _mask(rewriter, node, bias, True), None
            except NotAMask as more:
                found, bias = more.mask, value.node
                if found is not None:
                    bias = _without_lowest(rewriter, node, value)
            keeps += [] if found is None else [found]
    new = rewriter.same(node, attn_mask=bias, is_causal=False)
    rewriter.attentions.append(Attention(new, _all(keeps)))
    return rewriter.result(node, new, (*q.dims[:-1], v.dims[-1]))


def softmax(rewriter: Rewriter, node: Node) -> Value:
    """A softmax over features stays; one over tokens must be that of an attention."""
    value = rewriter.value(arguments(node)[0])
    axis = arguments(node)[1] % max(len(value.dims), 1)
    dim = value.dims[axis] if value.dims else ()
    if is_fixed(dim):
        return rewriter.result(node, rewriter.same(node), value.dims, is_sequence=value.is_sequence)
    others = [n for n in value.tokens if n != axis]
    if dim != (TOKEN,) or axis != len(value.dims) - 1 or others != [axis - 1] or value.role == WEIGHTS:
        raise rewriter.refuse(node, "it goes over tokens, and not over the scores of queries and keys")
    if node.target not in (aten.softmax.int, aten._softmax.default) or is_of_positions(rewriter, value):
        raise rewriter.refuse(node, "it goes over tokens, and is no attention's")
    new = rewriter.same(node)
    rewriter.attentions.append(Attention(new, _all(value.keeps)))
    return rewriter.result(node, new, value.dims, role=WEIGHTS)


def matmul(rewriter: Rewriter, node: Node) -> Value:
    """A product of features, of queries and keys (q·kᵀ), or of an attention's weights and values."""
    x, y = (rewriter.value(operand) for operand in arguments(node)[:2])
    if min(len(x.dims), len(y.dims)) < 2:
        if any(TOKEN in dim or BATCH in dim for z in (x, y) for dim in z.dims[-1:]):
            raise rewriter.refuse(node, "it sums over tokens or sequences")
        if len(y.dims) == 1 and len(x.dims) > 1:
            return rewriter.result(node, rewriter.same(node), x.dims[:-1], is_sequence=x.is_sequence)
        raise rewriter.refuse(node, "its first operand is a vector")
    if x.coordinate or y.coordinate or y.role == WEIGHTS:
        raise rewriter.refuse(node, "it is no product of features, nor of an attention")
    inner = x.dims[-1], y.dims[-2]
    is_attention = inner == ((TOKEN,), (TOKEN,)) and x.role == WEIGHTS
    if not is_attention and (x.role == WEIGHTS or not all(map(is_fixed, inner))):
        raise rewriter.refuse(node, "it sums over tokens or sequences, and is no attention's")
    rank = max(len(x.dims), len(y.dims))
    lead = []
    for axis in range(rank - 2):
        a, b = (z.dims[axis - rank + len(z.dims)] if axis >= rank - len(z.dims) else () for z in (x, y))
        if a != b and () not in (a, b):
            raise rewriter.refuse(node, f"its operands are not alike along dimension {axis}")
        lead.append(a or b)
    dims = (*lead, x.dims[-2], y.dims[-1])
    count = sum(dim.count(TOKEN) for dim in dims)
    if count > 1 and not (dims[-2:] == ((TOKEN,), (TOKEN,)) and count == 2):
        raise rewriter.refuse(node, "it has an element for each pair of tokens, and is no product of queries and keys")
    is_sequence = x.is_sequence or y.is_sequence
    if is_sequence and (x.tokens or y.tokens):
        raise rewriter.refuse(node, "it joins values of sequences with values of tokens")
    return rewriter.result(node, rewriter.same(node), dims, is_sequence=is_sequence)


ATTENTION_RULES = {
    aten.scaled_dot_product_attention.default: sdpa,
    **dict.fromkeys(
        [aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default], softmax
    ),
    **dict.fromkeys([aten.matmul.default, aten.bmm.default, aten.mm.default], matmul),
}
