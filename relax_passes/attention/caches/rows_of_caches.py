"""Find the mask's row of each query of an attention over a cache, for attentions to which the user gave a mask.

    attention(q, k, v[, mask][, bias])    →    attention(q, k, v[, bias], positions)    or, with a first row of 3,
                                               attention(q, k, v[, mask][, bias])

Preconditions: after `CanonicalizeAttention`, before `FoldMasks`; "main" has the attribute `STATES`.  A cache is a state
that a call writes its new keys into.  The query of a token has the row of the position at which the token's key is
written, in the user's mask at the length of the cache; columns are positions of the cache.

Positions that depend on no input and follow one another are a first row.  Others are an operand, read at run time.
The model's own mask and its causality have a row for each query of the call, in the call's order, so beside such
positions they become part of the bias.  Attentions that read a state in another way have no such rows: MaskError.
"""

import functools
import json
import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.caches.written_keys import WrittenKeys, written_keys
from relax_passes.attention.composite import AttentionCall, causal_keep, emit_attention, match_attention
from relax_passes.attention.repeated_heads import reshaped
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import STATES, Bindings, dtype_of, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.ir.same_values import same
from relax_passes.legalizations.closed_values import closed_values
from tir_kernels.errors import MaskError, StofError, UnsupportedError

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="RowsOfCaches")
class RowsOfCaches:
    """Tell attentions over caches which rows of the user's mask they have.

    Raises MaskError for a user's mask on an attention whose keys or values come from a state in any other way.  States
    of fewer than two dimensions are counters and statistics, not caches.

    Parameters
    ----------
    given_for : callable
        Maps a site's path and sizes (B, H, Sq, Skv) to the mask that the user gave for the site, or to None.
    replaceable : bool
        The user may give masks after the build, to every site: UnsupportedError where one could not be given.
    """

    def __init__(self, given_for: Callable, replaceable: bool = False):
        self.given_for, self.replaceable = given_for, replaceable

    def transform_module(self, mod, _ctx):
        main = mod["main"]
        if STATES not in (main.attrs or {}):
            return mod
        _, states = json.loads(str(main.attrs[STATES]))
        parameters = [main.params[number] for number, _ in states]
        caches = [x for x in parameters if len(shape_of(x)) >= 2]
        return _Placer(mod, self.given_for, caches, self.replaceable).transform()


@mutator
class _Placer(PyExprMutator):
    def __init__(self, mod, given_for: Callable, caches: list[relax.Var], replaceable: bool):
        super().__init__(mod)
        self.mod, self.given_for, self.caches, self.replaceable = mod, given_for, caches, replaceable
        self.bindings = Bindings(mod["main"])
        self.of_caches = self.bindings.computed_from(caches)
        self.closed = ClosedExpressions(self.bindings)
        self.written: dict[relax.Var, WrittenKeys] = {}  # the keys of an attention, by its result
        self.first_rows: dict[relax.Var, int] = {}  # of attentions whose positions depend on no input
        self.emitted: list[tuple[WrittenKeys, relax.Var]] = []  # positions known at run time

    def transform(self):
        for var, value in self.bindings.values.items():
            call = match_attention(self.mod, value)
            if call is not None and (written := self._written(call)) is not None:
                self.written[var] = written
        if not self.written:
            return self.mod
        self._find_first_rows()
        with closing_blocks(self.builder_):
            self.builder_.update_func(self.mod.get_global_var("main"), self.visit_expr(self.mod["main"]))
        return relax.transform.DeadCodeElimination()(self.builder_.get())

    def _written(self, call: AttentionCall) -> WrittenKeys | None:
        """Where the attention's keys are written; None without a cache or without a given mask.  Else MaskError."""
        (batch, heads, rows, _), length = shape_of(call.q), shape_of(call.k)[2]
        if call.k not in self.of_caches and call.v not in self.of_caches:
            return None
        if not self.replaceable and self.given_for(call.site, (batch, heads, length, length)) is None:
            return None
        keys, values = (written_keys(self.mod, self.bindings, x, self.caches) for x in (call.k, call.v))
        if isinstance(keys, str) or isinstance(values, str):
            raise self._refusal(call.site, keys if isinstance(keys, str) else str(values))
        if keys.tokens != rows:
            raise self._refusal(call.site, f"{keys.tokens} tokens are written for {rows} queries")
        if not self._are_same(keys, values):
            raise self._refusal(call.site, "its keys and values are written at different positions")
        return keys._replace(wraps=keys.wraps and values.wraps)

    def _refusal(self, site: str, reason: str) -> StofError:
        if self.replaceable:
            return UnsupportedError(
                f"the attention {named(site)} reads a cache that the model updates, and no mask can be given to it "
                f"later: {reason}; leave replaceable_masks out"
            )
        return MaskError(
            f"the attention {named(site)} reads a cache that the model updates, where the rows of a given mask are the "
            f"positions of new tokens, but {reason}: let the model compute its mask from positions (attn_mask), or use "
            "attn_implementation='stof' and stof_tvm.transformers.set_mask"
        )

    def _are_same(self, a: WrittenKeys, b: WrittenKeys) -> bool:
        if same(self.bindings, a.index, b.index):
            return True
        if not all(self.closed.is_closed(x.index) for x in (a, b)):
            return False
        first, second = closed_values(self.bindings, [a.index, b.index])
        return np.array_equal(first.reshape(-1), second.reshape(-1))

    def _find_first_rows(self) -> None:
        known = {var: written for var, written in self.written.items() if self.closed.is_closed(written.index)}
        arrays = closed_values(self.bindings, [written.index for written in known.values()])
        for (var, written), array in zip(known.items(), arrays):
            positions = array.reshape(-1).astype(np.int64)
            positions[(positions < 0) & written.wraps] += written.length
            follow = np.array_equal(positions, np.arange(positions[0], positions[0] + written.tokens))
            if follow and 0 <= positions[0] and positions[-1] < written.length:
                self.first_rows[var] = int(positions[0])

    def visit_var_binding_(self, binding):
        if binding.var not in self.written:
            super().visit_var_binding_(binding)
            return
        call = match_attention(self.mod, binding.value)
        assert call is not None
        first_row = self.first_rows.get(binding.var)
        visit = lambda x: None if x is None else self.visit_expr(x)
        if first_row is not None:
            own = dict(mask=visit(call.mask), bias=visit(call.bias), causal=call.causal, first_row=first_row)
        else:
            own = dict(bias=self._bias(call), positions=self._positions(self.written[binding.var]))
        new = emit_attention(
            self.builder_,
            *map(visit, (call.q, call.k, call.v)),
            sink=visit(call.sink),
            scale=call.scale,
            softcap=call.softcap,
            empty_rows=call.empty_rows,
            site=call.site,
            spelling=call.spelling,
            **own,
        )
        if self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar):
            new = self.builder_.emit_output(new)
        self.set_var_remap(binding.var, new)

    def _positions(self, written: WrittenKeys) -> relax.Var:
        """int64 (Sq,); a negative one counts from the end.  Attentions with the same positions share them."""
        for other, known in self.emitted:
            if other.wraps == written.wraps and same(self.bindings, other.index, written.index):
                return known
        emit = self.builder_.emit
        positions = reshaped(emit, self.visit_expr(written.index), (written.tokens,))
        if dtype_of(positions) != "int64":
            positions = emit(op.astype(positions, "int64"))
        if not written.wraps:
            is_outside = emit(op.less(positions, relax.const(0, "int64")))
            positions = emit(op.where(is_outside, relax.const(written.length, "int64"), positions))
        self.emitted.append((written, positions))
        return positions

    def _bias(self, call: AttentionCall) -> relax.Expr | None:
        """The model's own mask, causality and bias as one bias: all have a row for each query of the call."""
        emit, summands = self.builder_.emit, []
        zero, minus_inf = relax.const(0.0, "float32"), relax.const(-math.inf, "float32")
        if call.causal:
            rows, length = shape_of(call.q)[2], shape_of(call.k)[2]
            keep = emit(op.reshape(causal_keep(emit, rows, length, call.causal), (1, 1, rows, length)))
            summands.append(emit(op.where(keep, zero, minus_inf)))
        if call.mask is not None:
            summands.append(emit(op.where(self.visit_expr(call.mask), zero, minus_inf)))
        if call.bias is not None:
            summands.append(self.visit_expr(call.bias))
        if len(summands) < 2:
            return summands[0] if summands else None
        summands = [x if dtype_of(x) == "float32" else emit(op.astype(x, "float32")) for x in summands]
        return functools.reduce(lambda x, y: emit(op.add(x, y)), sorted(summands, key=lambda x: math.prod(shape_of(x))))
