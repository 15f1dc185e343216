"""The rule of attention: keys that are padding are masked, and values there are finite."""

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, is_first, is_padded, same
from stof_tvm.frontend.padding.rewriter import Rewriter, Value
from stof_tvm.frontend.padding.rules.bounded import make_finite

aten = torch.ops.aten
LARGEST_MASK = 1 << 28  # elements of a mask whose values are looked at


def _attention(rewriter: Rewriter, node: Node) -> Value:
    """scaled_dot_product_attention: q (*, H, Sq, D), k (*, Hkv, Skv, D), v (*, Hkv, Skv, Dv).

    Rows of queries that are padding are rows of padding.  A key that is padding must get no weight, so it is masked,
    except where a mask of the model keeps no key after the query's own: then a real query reads real keys only.  A key
    that gets a weight of 0 is multiplied all the same in a block that others are in, and its score computed: keys and
    values of padding are finite, since 0 times infinity would be NaN, or else zeros.
    """
    given = rewriter.given(node)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    q, k, v = (rewriter.value(x).dims for x in (query, key, value))
    mask = given.get("attn_mask")
    m = rewriter.value(mask).dims if mask is not None else ()
    if is_padded(q[-1]) or is_padded(k[-1]) or any(rewriter.has_symbols(x) for x in [node]):
        raise rewriter.refuse(node, "heads' sizes depend on the inputs' sizes")
    if rewriter.has_masks and any(not is_first(dim) for dim in (*q, *k, *v)):
        raise rewriter.refuse(node, "masks are given, and rows or columns have padding inside")
    if not same(k[-2], v[-2]):
        raise rewriter.refuse(node, "keys and values have padding in different places")
    rank = max(len(q), len(k), len(v), len(m))
    leading = _leading(rewriter, node, [q, k, v, m], rank)
    if m and not all(dim == () or same(dim, own) for dim, own in zip(reversed(m), (k[-2], q[-2]))):
        raise rewriter.refuse(node, "its mask has padding in other places than the scores")
    result = Value((*leading, q[-2], v[-1]))
    if not is_padded(k[-2]):
        return result
    for name, x in (("key", key), ("value", value)):
        axis = len(rewriter.value(x).dims) - 2
        if not make_finite(rewriter, x):
            rewriter.set_argument(node, name, rewriter.filled(x, [axis], 0.0, node))
    is_causal = given.get("is_causal", False)
    is_square = same(q[-2], k[-2]) and is_first(q[-2])
    if is_causal and not is_square:
        raise rewriter.refuse(node, "it is causal, with other lengths of queries than of keys")
    if not is_causal and not (is_square and mask is not None and _looks_back(rewriter, mask)):
        rewriter.set_argument(node, "attn_mask", _masked(rewriter, node, mask, k[-2], key.meta["val"].device))
    return result


def _leading(rewriter: Rewriter, node: Node, operands: list[tuple[Dim, ...]], rank: int) -> list[Dim]:
    """The dimensions before the last two, spread; fewer heads of keys, each for a group, are static."""
    result: list[Dim] = [()] * (rank - 2)
    for dims in operands:
        own = dims[:-2]
        for axis, dim in enumerate(own, start=rank - 2 - len(own)):
            held = result[axis]
            if not is_padded(dim) and not is_padded(held):
                sizes = [d[0] if d else 1 for d in (dim, held)]
                result[axis] = (max(sizes),) if max(sizes) > 1 else ()
            elif held == ():
                result[axis] = dim
            elif dim != () and not same(dim, held):
                raise rewriter.refuse(node, f"its operands have padding in different places along dimension {axis}")
    return result


def _looks_back(rewriter: Rewriter, mask: Node) -> bool:
    """Whether a mask that is the same in every call keeps no key after the query's own."""
    if mask.meta["val"].dim() < 2 or 1 in mask.meta["val"].shape[-2:]:
        return False
    constant = rewriter.constant(mask, LARGEST_MASK)
    if constant is None:
        return False
    kept = constant if constant.dtype == torch.bool else constant != -float("inf")
    return not bool(kept.flatten(end_dim=-3).any(0).triu(1).any() if kept.dim() > 2 else kept.triu(1).any())


def _masked(rewriter: Rewriter, node: Node, mask: Node | None, keys: Dim, device: torch.device) -> Node:
    """The mask, without the keys that are padding."""
    kept = rewriter.kept(keys, device)
    if mask is None:
        return rewriter.emit(node, aten.view.default, kept, [1, -1])
    value = rewriter.value(mask)
    axis = len(value.dims) - 1
    if value.dims[axis] != ():
        return rewriter.filled(mask, [axis], False if mask.meta["val"].dtype == torch.bool else -float("inf"), node)
    if mask.meta["val"].dtype == torch.bool:
        return rewriter.emit(node, aten.logical_and.default, mask, kept)
    return rewriter.emit(node, aten.where.ScalarOther, kept, mask, -float("inf"))


ATTENTION_RULES = {aten.scaled_dot_product_attention.default: _attention}
