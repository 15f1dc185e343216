"""Attention of some queries: those whose results are read.  Keys and values stay whole.

    rows of attention(q, k, v[, mask][, bias])    →    attention(rows of q, k, v[, rows of mask][, rows of bias])

Rows known in advance have the rows of constant masks, and of a user's mask those from `first_row` on.  Of rows given at
run time the model's own masks become a bias, and a user's mask is read at their positions.  Where this cannot be said,
or another pass decides by all rows, the attention stays as it is, and the reason is in `AttentionRows.may_narrow`.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.composite import AttentionCall, emit_attention
from relax_passes.ir.bindings import dtype_of, shape_of, static_shape
from relax_passes.ir.constant_arrays import array_of
from relax_passes.read_rows.emitted import RowTaker
from relax_passes.read_rows.moves import Slot, broadcast
from relax_passes.read_rows.places import Digit, NotMoved, Place
from relax_passes.read_rows.selections import Selection
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.registry import templates_for
from tir_kernels.errors import StofError
from tir_kernels.masks.block_counts import FINEST

op = relax.op
LARGEST_MASK = 1 << 24  # elements of a causal mask that is written out, and of a bias that is made of it
MOST_POSITIONS = 128  # of rows of a given mask: kernels that read positions read a row's keys for this row only
QUERIES = 2  # their axis in all operands but keys and values


class AttentionRows:
    """Narrows the attentions of a module.

    Parameters
    ----------
    target : tvm.target.Target
    float32 : str
        How attention in float32 is multiplied on a GPU.
    mask_of : callable
        Maps an AttentionSite to its whole mask: a SiteMask.
    given_for, rule_for, order_for : callable
        What the user gave for the attention at a path: SiteMask has them.
    """

    def __init__(
        self,
        target: tvm.target.Target,
        float32: str,
        mask_of: Callable,
        given_for: Callable,
        rule_for: Callable,
        order_for: Callable,
    ):
        self.target, self.float32, self.mask_of = target, float32, mask_of
        self.given_for, self.rule_for, self.order_for = given_for, rule_for, order_for

    def slots(self, call: AttentionCall, place: Place, selection: Selection) -> list[Slot]:
        """The slots of the operands, in order; NotMoved where the rows cannot be computed alone."""
        if static_shape(call.q) is None or not self._are_queries(shape_of(call.q), place, selection):
            raise NotMoved
        if not self._may_narrow(call, selection):
            raise NotMoved
        if selection.rows is not None and self._keeps_nothing(call, selection.rows):
            raise NotMoved
        result = (*shape_of(call.q)[:3], shape_of(call.k)[2])
        slots: list[Slot] = [place, None, None]
        slots += [broadcast(place, result, shape_of(x)) for x in (call.mask, call.bias) if x is not None]
        return slots if call.sink is None else [*slots, None]

    def _are_queries(self, shape: tuple[int, ...], place: Place, selection: Selection) -> bool:
        """Whether each row is one query of `shape`, and each batch entry with rows of its own one of its batch."""
        of_batch = place.batch is None or place.batch == Digit(0, shape[0])
        return of_batch and place.rows == Digit(QUERIES, shape[QUERIES]) and shape[QUERIES] == selection.size

    def _may_narrow(self, call: AttentionCall, selection: Selection) -> bool:
        operands = [x for x in (call.q, call.k, call.v, call.mask, call.bias) if x is not None]
        if any(static_shape(x) is None for x in operands) or call.first_row is not None or call.positions is not None:
            return False
        if call.mask is not None and not isinstance(call.mask, GenericConst):
            return False  # it stays dense, as `FoldMasks` left it
        q_len, kv_len = shape_of(call.q)[2], shape_of(call.k)[2]
        count, rows = selection.count, selection.rows
        if call.causal and rows is None and call.causal == "bottom-right" and q_len > kv_len:
            return False  # rows without a key
        if call.causal and rows is not None and self._causal(call, rows) is None and count * kv_len > LARGEST_MASK:
            return False
        has_rows = bool(call.causal) or (call.mask is not None and shape_of(call.mask)[QUERIES] > 1)
        if rows is None and has_rows and max(1, selection.batch) * count * kv_len > LARGEST_MASK:
            return False
        if self.rule_for(call.site) is not None or self.order_for(call.site, call.mask_sizes) is not None:
            return False
        if self.given_for(call.site, call.mask_sizes) is None:
            return True
        if q_len != kv_len:
            return False
        if rows is not None:
            return bool((np.diff(rows) == 1).all())
        return not selection.batch and count <= MOST_POSITIONS and self._has_kernel(call, count)

    def _keeps_nothing(self, call: AttentionCall, rows: np.ndarray) -> bool:
        """Whether no key is kept of all rows known in advance: a mask that keeps nothing at all is an error."""
        batch, heads, q_len, kv_len = call.mask_sizes
        mask = None if call.mask is None else array_of(call.mask).astype(bool)
        if mask is not None and mask.shape[QUERIES] == q_len:
            mask = mask.take(rows, QUERIES)
        own = self._of_constants(call, rows, mask)
        constant = None if own["mask"] is None else array_of(own["mask"]).astype(bool)
        first_row = None if self.given_for(call.site, call.mask_sizes) is None else int(rows[0])
        sizes = batch, heads, len(rows), kv_len
        found = self.mask_of(AttentionSite(call.site, own["causal"], constant, sizes, first_row, call.heads))
        return found is not None and found.compile(len(rows), kv_len, FINEST).is_empty

    def _has_kernel(self, call: AttentionCall, count: int) -> bool:
        """Whether a kernel reads the rows of a mask at positions that are given at run time."""
        batch, heads, _, head_dim = shape_of(call.q)
        _, kv_heads, kv_len, v_head_dim = shape_of(call.v)
        bias = (1, 1, count, kv_len) if self._has_own(call) else None
        sink = None if call.sink is None else dtype_of(call.sink)
        try:
            problem = AttentionProblem(
                *(batch, heads, kv_heads, count, kv_len, head_dim, v_head_dim, dtype_of(call.q), call.scale),
                bias_shape=bias,
                sink_dtype=sink,
                softcap=call.softcap,
                float32=self.float32 if self.target.kind.name == "cuda" and dtype_of(call.q) == "float32" else "ieee",
                has_positions=True,
            )
            return any(x.unsupported(problem, self.target) is None for x in templates_for(self.target))
        except StofError:
            return False

    def _has_own(self, call: AttentionCall) -> bool:
        return bool(call.causal) or call.mask is not None or call.bias is not None

    def _causal(self, call: AttentionCall, rows: np.ndarray) -> str | None:
        return causality(call.causal, shape_of(call.q)[2], shape_of(call.k)[2], rows)

    def emit(self, builder, call: AttentionCall, operands: list, taker: RowTaker) -> relax.Expr:
        """The attention of the selected rows; `operands` are those of the composite, with rows taken."""
        given = iter(operands)
        q, k, v = (next(given) for _ in range(3))
        mask, bias, sink = (None if x is None else next(given) for x in (call.mask, call.bias, call.sink))
        more: dict = dict(mask=mask, bias=bias, causal="")
        has_mask = self.given_for(call.site, call.mask_sizes) is not None
        rows = taker.selection.rows
        if rows is not None:
            more |= self._of_constants(call, rows, None if mask is None else array_of(mask).astype(bool))
            more["first_row"] = int(rows[0]) if has_mask else None
        elif self._has_own(call):
            more["mask"], more["bias"] = None, self._bias(builder.emit, call, mask, bias, taker)
        if rows is None and has_mask:
            more["positions"] = taker.numbers()
        return emit_attention(
            *(builder, q, k, v),
            sink=sink,
            scale=call.scale,
            softcap=call.softcap,
            empty_rows=call.empty_rows,
            site=call.site,
            spelling=call.spelling,
            heads=call.heads,
            **more,
        )

    def _of_constants(self, call: AttentionCall, rows: np.ndarray, keep: np.ndarray | None) -> dict:
        return own_of_rows(call.causal, shape_of(call.q)[2], shape_of(call.k)[2], rows, keep)

    def _bias(self, emit: Callable, call: AttentionCall, mask, bias, taker: RowTaker) -> relax.Expr:
        """Causality, mask and bias of rows given at run time, as one bias."""
        zero, minus_inf = relax.const(0.0, "float32"), relax.const(-math.inf, "float32")
        summands = []
        if call.causal:
            numbers, count = taker.numbers(), taker.selection.count
            q_len, kv_len = shape_of(call.q)[2], shape_of(call.k)[2]
            if call.causal == "bottom-right" and kv_len != q_len:
                numbers = emit(op.add(numbers, relax.const(kv_len - q_len, "int64")))
            last = emit(op.reshape(numbers, (max(1, taker.selection.batch), 1, count, 1)))
            keys = relax.const(np.arange(kv_len).reshape(1, 1, 1, kv_len), "int64")
            summands.append(emit(op.where(emit(op.less_equal(keys, last)), zero, minus_inf)))
        if mask is not None:
            summands.append(emit(op.where(mask, zero, minus_inf)))
        if bias is not None:
            summands.append(bias)
        if len(summands) == 1:
            return summands[0]
        summands = [x if dtype_of(x) == "float32" else emit(op.astype(x, "float32")) for x in summands]
        return functools.reduce(lambda x, y: emit(op.add(x, y)), sorted(summands, key=lambda x: math.prod(shape_of(x))))


def causality(causal: str, q_len: int, kv_len: int, rows: np.ndarray) -> str | None:
    """The causality of rows, int64 (rows,), in the words of the composite; None where it has none for them."""
    if not causal or not (np.diff(rows) == 1).all():
        return None if causal else ""
    keys = int(rows[0]) + 1 + (kv_len - q_len if causal == "bottom-right" else 0)  # that the first row keeps
    if keys >= kv_len:
        return ""
    if keys == 1:
        return "top-left"
    return "bottom-right" if keys == kv_len - len(rows) + 1 else None


def own_of_rows(causal: str, q_len: int, kv_len: int, rows: np.ndarray, keep: np.ndarray | None) -> dict:
    """Causality and mask, as `emit_attention` takes them, of rows known in advance.

    `keep`, bool (B or 1, H or 1, rows or 1, Skv), is the model's own mask of these rows.
    """
    words = causality(causal, q_len, kv_len, rows)
    if words is None:
        last = rows + (kv_len - q_len if causal == "bottom-right" else 0)
        own = (np.arange(kv_len) <= last[:, None])[None, None]
        keep = own if keep is None else keep & own
    if keep is not None and keep.all():
        keep = None
    return dict(causal=words or "", mask=None if keep is None else relax.const(keep, "bool"))
