"""ShiftedQuotients: in indices, quotients of shifted numbers are written without the shift.

    (v + c) // d   =   v // d + c // d + (1 if v % d >= d - c % d else 0)          where d does not divide c
    (c - w) // d   =   -((w + d - 1 - c) // d)
    (c - w) % d    =   (d - 1) * w % d + c % d - (d if (d - 1) * w % d >= d - c % d else 0)

Where v is `f % n` of a fused loop, TVM's FlattenBuffer takes the left side for `(f + c) % n // d`, or cancels the
remainder altogether: another element, or one outside the buffer.  PyTorch's `out[..., 0::2] = …`, a slice of an
interleaved tensor and a window that moves by two have such indices.  (c - w) % d // e, of reversed pairs, it takes for
-w // e % (d // e).  The right sides it leaves as they are.

Preconditions: after scheduling, which needs the plain form; before TVM's own lowering.
"""

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import TensorLoad

from relax_passes.mapped_bodies import with_mapped_bodies


@tvm.transform.module_pass(opt_level=0, name="ShiftedQuotients")
class ShiftedQuotients:
    """Rewrite these quotients in every schedulable function of a module."""

    def transform_module(self, mod, _ctx):
        return with_mapped_bodies(mod, [(TensorLoad, _rewrite_load), (tirx.BufferStore, _rewrite_store)])


def _rewrite_load(load):
    indices, is_new = _rewritten(load.indices)
    return tirx.BufferLoad(load.source, indices) if is_new else load


def _rewrite_store(store):
    indices, is_new = _rewritten(store.indices)
    return tirx.BufferStore(store.buffer, store.value, indices) if is_new else store


def _rewritten(indices) -> tuple[list, bool]:
    callbacks = [(tirx.FloorDiv, _without_shift), (tirx.FloorMod, _falling_without_shift)]
    new = [tvm_ffi.structural_map(index, callbacks, order="post") for index in indices]
    return new, any(not a.same_as(b) for a, b in zip(new, indices))


def _without_shift(quotient):
    if not isinstance(quotient.b, tirx.IntImm) or int(quotient.b) <= 1:
        return quotient
    divisor, dtype = int(quotient.b), str(quotient.ty.dtype)
    terms: list = []
    shift = _collect(tvm.sym.Analyzer().canonical_simplify(quotient.a), 1, terms)
    is_falling = bool(terms) and all(factor < 0 for _, factor in terms)
    if not terms or shift % divisor == 0 and not is_falling:
        return quotient
    if is_falling:  # (c - w) // d = -((w + d - 1 - c) // d)
        terms, shift = [(term, -factor) for term, factor in terms], divisor - 1 - shift
    rest = _sum(terms)
    whole = tirx.floordiv(rest, divisor) + shift // divisor
    if shift % divisor:
        whole = whole + (tirx.floormod(rest, divisor) >= divisor - shift % divisor).astype(dtype)
    return 0 - whole if is_falling else whole


def _falling_without_shift(remainder):
    if not isinstance(remainder.b, tirx.IntImm) or int(remainder.b) <= 1:
        return remainder
    divisor, dtype = int(remainder.b), str(remainder.ty.dtype)
    terms: list = []
    shift = _collect(tvm.sym.Analyzer().canonical_simplify(remainder.a), 1, terms) % divisor
    if all(factor > 0 for _, factor in terms):
        return remainder
    rest = tirx.floormod(_sum([(term, factor % divisor) for term, factor in terms]), divisor)
    if not shift:
        return rest
    return rest + shift - divisor * (rest >= divisor - shift).astype(dtype)


def _sum(terms: list):
    return sum((_scaled(term, factor) for term, factor in terms[1:]), _scaled(*terms[0]))


def _scaled(term, factor: int):
    return term if factor == 1 else term * factor


def _collect(expr, factor: int, terms: list) -> int:
    """The constant of a sum, whose other summands are added to `terms` as (expression, factor)."""
    if isinstance(expr, tirx.IntImm):
        return factor * int(expr)
    if isinstance(expr, tirx.Add | tirx.Sub):
        second = factor if isinstance(expr, tirx.Add) else -factor
        return _collect(expr.a, factor, terms) + _collect(expr.b, second, terms)
    if isinstance(expr, tirx.Mul) and isinstance(expr.b, tirx.IntImm):
        return _collect(expr.a, factor * int(expr.b), terms)
    terms.append((expr, factor))
    return 0
