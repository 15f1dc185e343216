"""Attention of some queries and of the keys within their window.

    rows of attention(q, k, v)    →    attention(rows of q, rows of k, rows of v)

What such an attention keeps goes by the distance of a key from its query: a user's window, the model's own, a causal
mask within one.  So the rows may lie anywhere, and the masks are those of as many first keys.
"""

import math
from collections.abc import Callable

import numpy as np
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.composite import AttentionCall, emit_attention
from relax_passes.ir.bindings import shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of
from relax_passes.read_rows.attentions import LARGEST_MASK, QUERIES, causality, own_of_rows
from relax_passes.read_rows.places import NotMoved
from relax_passes.read_rows.spans import Span
from tir_kernels.masks.block_counts import FINEST

Reach = tuple[float, float]  # how far before and behind its query's place a key is kept; infinity for any distance


class AttentionWindows:
    """Narrows attentions to their windows.

    Parameters
    ----------
    mask_of : callable
        Maps an AttentionSite to its whole mask: a SiteMask.
    given_for, rule_for, order_for : callable
        What the user gave for the attention at a path: SiteMask has them.
    reach_for : callable
        The same, of the user's mask: its Reach, or None where that does not go by distance.
    """

    def __init__(
        self, mask_of: Callable, given_for: Callable, rule_for: Callable, order_for: Callable, reach_for: Callable
    ):
        self.mask_of, self.given_for = mask_of, given_for
        self.rule_for, self.order_for, self.reach_for = rule_for, order_for, reach_for
        self._of_masks: dict[GenericConst, Reach | None] = {}  # arrays are long

    def keys(self, call: AttentionCall, queries: Span, example: int, inside: Callable[[Span], Span | None]) -> Span:
        """The keys within the window of some queries; NotMoved where none is known.

        Parameters
        ----------
        call : AttentionCall
            That of all queries.
        queries : Span
            Counted from one place, as the keys.
        example : int
            One such place.
        inside : callable
            Maps a Span to the rows of it that there are, and maybe others; None where it may lie outside.
        """
        operands = [x for x in (call.q, call.k, call.v, call.mask, call.bias) if x is not None]
        if any(static_shape(x) is None for x in operands) or call.first_row is not None or call.positions is not None:
            raise NotMoved
        length = shape_of(call.q)[QUERIES]
        if shape_of(call.k)[QUERIES] != length:
            raise NotMoved
        if call.bias is not None and shape_of(call.bias)[QUERIES:] != (1, 1):
            raise NotMoved
        if self.rule_for(call.site) is not None or self.order_for(call.site, call.mask_sizes) is not None:
            raise NotMoved
        reaches = [self.reach_for(call.site, call.mask_sizes), self._of_mask(call.mask, length)]
        if any(reach is None for reach in reaches):
            raise NotMoved
        left, right = (min(x) for x in zip(*reaches, (math.inf, 0.0 if call.causal else math.inf)))
        if not math.isfinite(left + right):
            raise NotMoved
        wanted = Span(queries.start - int(left), queries.stop + int(right))
        if (keys := inside(wanted)) is None:
            raise NotMoved
        first = queries.start - keys.start
        rows = np.arange(first, first + queries.count)
        if causality(call.causal, keys.count, keys.count, rows) is None and queries.count * keys.count > LARGEST_MASK:
            raise NotMoved
        is_cut = keys.start > wanted.start or keys.stop < wanted.stop
        if is_cut and self._keeps_nothing(call, queries, keys, example):
            raise NotMoved
        return keys

    def _keeps_nothing(self, call: AttentionCall, queries: Span, keys: Span, example: int) -> bool:
        """Whether no key is kept of all queries, at an end of the sequence: such a mask is an error."""
        more = self._masks(call, queries, keys, example)
        constant = None if more["mask"] is None else array_of(more["mask"]).astype(bool)
        batch, heads, *_ = shape_of(call.q)
        sizes = batch, heads, queries.count, keys.count
        found = self.mask_of(AttentionSite(call.site, more["causal"], constant, sizes, more["first_row"], call.heads))
        return found is not None and found.compile(queries.count, keys.count, FINEST).is_empty

    def _of_mask(self, mask, length: int) -> Reach | None:
        """The Reach of a model's own mask; None where that is not by distance."""
        if mask is None:
            return math.inf, math.inf
        if not isinstance(mask, GenericConst) or shape_of(mask)[QUERIES:] != (length, length):
            return None
        if mask not in self._of_masks:
            self._of_masks[mask] = _reach(array_of(mask).astype(bool))
        return self._of_masks[mask]

    def emit(self, builder, call: AttentionCall, operands: list, queries: Span, keys: Span, example: int) -> relax.Expr:
        """The attention of some queries.

        Parameters
        ----------
        call : AttentionCall
            That of all queries.
        operands : list
            Those of the composite, of the queries and of the keys.
        queries, keys : Span
            Counted from one place.
        example : int
            One such place.
        """
        given = iter(operands)
        q, k, v = (next(given) for _ in range(3))
        _, bias, sink = (None if x is None else next(given) for x in (call.mask, call.bias, call.sink))
        return emit_attention(
            *(builder, q, k, v),
            **self._masks(call, queries, keys, example),
            bias=bias,
            sink=sink,
            scale=call.scale,
            softcap=call.softcap,
            empty_rows=call.empty_rows,
            site=call.site,
            spelling=call.spelling,
            heads=call.heads,
        )

    def _masks(self, call: AttentionCall, queries: Span, keys: Span, example: int) -> dict:
        """Causality, mask and first row, as `emit_attention` takes them, of some queries and keys."""
        first, keep = queries.start - keys.start, None
        if call.mask is not None:
            rows, columns = (slice(example + span.start, example + span.stop) for span in (queries, keys))
            keep = array_of(call.mask).astype(bool)[:, :, rows, columns]
        numbers = np.arange(first, first + queries.count)
        own = own_of_rows(call.causal, keys.count, keys.count, numbers, keep)
        has_mask = self.given_for(call.site, call.mask_sizes) is not None
        return {**own, "first_row": first if has_mask else None}


def _reach(keep: np.ndarray) -> Reach | None:
    """The Reach of bool (B, H, S, S); None unless it is by distance, and for one that keeps nothing."""
    if not np.array_equal(keep[:, :, 1:, 1:], keep[:, :, :-1, :-1]):
        return None
    before, behind = np.flatnonzero(keep[:, :, :, 0].any((0, 1))), np.flatnonzero(keep[:, :, 0].any((0, 1)))
    return (float(max(before, default=0)), float(max(behind, default=0))) if len(before) + len(behind) else None
