"""Refusal of masks whose rows would be counted from 0 where queries are the last of many tokens.

A model that keeps its keys outside, and puts those of a call behind them, asks with few queries for many keys.  The
query of the first new token is not the mask's first row.  Which one it is can be guessed only: the older keys may be
earlier tokens, or a prefix that is counted as columns alone.
"""

import json
import math
from typing import NamedTuple

import torch

from relax_passes.attention.composite import AttentionCall, match_attention
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import STATES, Bindings, shape_of
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.part import Part
from stof_tvm.older_keys.rows import Rows
from stof_tvm.site_masks import SiteMasks
from tir_kernels.errors import MaskError, UnsupportedError

LENGTH = 2  # the axis of keys (B, H, S, D)
LARGEST = 1 << 24  # elements of a mask that are compared row by row


class Older(NamedTuple):
    """Keys before those of new tokens: `first_row` is the position of the first new one, None where it is not known."""

    first_row: int | None


def refuse_older_keys(mod, site_masks: SiteMasks, replaceable: bool) -> None:
    """MaskError for a given mask on an attention whose keys are an input's with those of the queries' tokens behind.

    A mask is let through if it is the same however the rows are counted, or if it fits Sq × Skv only: a tensor.  Keys
    of states are `RowsOfCaches`'s.

    Parameters
    ----------
    mod : tvm.IRModule
        After `CanonicalizeAttention`.
    site_masks : SiteMasks
        What the user gave.
    replaceable : bool
        Masks may be given later: UnsupportedError for such an attention.
    """
    if not replaceable and not site_masks.by_pattern:
        return
    rows = None
    bindings = Bindings(mod["main"])
    for value in bindings.values.values():
        call = match_attention(mod, value)
        if call is None or shape_of(call.q)[LENGTH] >= shape_of(call.k)[LENGTH]:
            continue
        if not replaceable and not site_masks.is_given(call.site):
            continue
        rows = rows or Rows(mod)
        older = _older(rows, call)
        if older is None or _is_of_states(mod, bindings, call):
            continue
        if replaceable:
            raise UnsupportedError(f"{_found(call)}, and no mask can be given to it later: leave replaceable_masks out")
        batch, heads, q_len, kv_len = call.mask_sizes
        mask = SiteMasks.given_for(site_masks, call.site, (batch, heads, q_len, kv_len))
        if mask is not None and not _is_the_same(site_masks, call, mask, older):
            raise MaskError(
                f"{_found(call)}: the rows of {mask!r} would be counted from 0, not from the first new token.  Let the "
                "model write its keys into a cache of a fixed length (cache_implementation='static' in transformers) "
                f"or compute its mask from positions, or give a tensor of the {q_len} × {kv_len} pairs that are meant"
            )


def _found(call: AttentionCall) -> str:
    _, _, q_len, kv_len = call.mask_sizes
    return (
        f"the attention {named(call.site)} puts new keys to those of an input, such as a cache that grows "
        f"({q_len} × {kv_len} pairs)"
    )


def _older(rows: Rows, call: AttentionCall) -> Older | None:
    """Keys before the new ones; None where there are none, or keys and queries have no tokens in common."""
    own = rows.of(call.q)
    for join in rows.joins(call.k, LENGTH, own) if own else ():
        inputs = [rows.of(part) for part in join.parts]
        is_new = [bool(x) and x <= own for x in inputs]
        is_older = [not x <= own for x in inputs]
        if not join.is_in_order:
            if any(is_new) and any(is_older):
                return Older(None)
        elif any(is_new) and any(is_older[: len(is_new) - is_new[::-1].index(True)]):
            return Older(shape_of(call.k)[LENGTH] - shape_of(call.q)[LENGTH])
    return None


def _is_of_states(mod, bindings: Bindings, call: AttentionCall) -> bool:
    """Whether the keys or values are computed from a tensor that calls update."""
    main = mod["main"]
    if STATES not in (main.attrs or {}):
        return False
    _, states = json.loads(str(main.attrs[STATES]))
    caches = [x for x in (main.params[number] for number, _ in states) if len(shape_of(x)) >= 2]
    found = bindings.computed_from(caches)
    return call.k in found or call.v in found


def _is_the_same(site_masks: SiteMasks, call: AttentionCall, mask: Mask, older: Older) -> bool:
    """Whether a mask at Sq × Skv keeps what its rows of the tokens' positions keep, or has no such rows."""
    batch, heads, q_len, kv_len = call.mask_sizes
    try:
        whole = SiteMasks.given_for(site_masks, call.site, (batch, heads, kv_len, kv_len))
        assert whole is not None
        whole.compile(kv_len, kv_len)
    except MaskError:
        return True  # it was made for these rows
    if older.first_row is not None:
        last = Part(whole, older.first_row, 0, kv_len)
        return last.compile(q_len, kv_len).digest == mask.compile(q_len, kv_len).digest
    if kv_len * kv_len * math.prod((whole.batch or 1, whole.heads or 1)) > LARGEST:
        return False
    dense = whole.dense(kv_len)
    return torch.equal(dense, dense[..., :1, :].expand_as(dense))
