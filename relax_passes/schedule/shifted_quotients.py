"""ShiftedQuotients: in indices and conditions, quotients of shifted numbers are written without the shift.

    (v + c) // d   =   v // d + c // d + (1 if v % d >= d - c % d else 0)          where d does not divide c
    (c - w) // d   =   -((w + d - 1 - c) // d)
    (v + c) % d    =   v % d + c % d - (d if v % d >= d - c % d else 0)
    (c - w) % d    =   (d - 1) * w % d + c % d - (d if (d - 1) * w % d >= d - c % d else 0)

Where v is `f % n` for a fused loop f, TVM's FlattenBuffer takes the left side for `(f + c) % n // d`, or cancels the
remainder altogether.  The index then is that of another element, or lies outside the buffer.  PyTorch's
`out[..., 0::2] = …`, a slice of an interleaved tensor and a window that moves by two have such indices.  Where index 0
is `v // 2` and index 1 `(v + 1) % 2`, as a slice of a repeated tensor has them, FlattenBuffer moves the shift of one
into the other.

FlattenBuffer also takes (c - w) % d // e, an index of reversed pairs, for -w // e % (d // e).  It makes the same
mistake with (v + c) % d // e, the index of a head if the halves of heads are swapped after heads were joined.  It
leaves the right sides as they are.

Expressions that depend on values of tensors stay as they are: TVM knows nothing of these values, and large ones would
overflow.

A long index of a chain of reshapes is simplified first, by the ranges of its loops: most of its summands are 0.

Preconditions: after scheduling, which needs the plain form; before TVM's own lowering.
"""

import functools

import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir import TensorLoad

from relax_passes.ir.mapped_bodies import with_mapped_bodies
from tir_kernels.errors import UnsupportedError

LONG = 40  # quotients and remainders in one index
MOST = 800  # each of a chain of shifts has those before it two or three times


@tvm.transform.module_pass(opt_level=0, name="ShiftedQuotients")
class ShiftedQuotients:
    """Rewrite these quotients in every schedulable function of a module."""

    def transform_module(self, mod, _ctx):
        too_long: list = []

        def callbacks(func: tirx.PrimFunc) -> list:
            if _count(func.body) == 0:
                return []
            own = _Function(func, too_long)
            return [(TensorLoad, own.load), (tirx.BufferStore, own.store)]

        mod = with_mapped_bodies(mod, callbacks)
        if too_long:
            raise UnsupportedError(
                f"an index has more than {MOST} quotients: too many reshapes and slices follow one another, without an "
                "operator between them that computes something"
            )
        return mod


class _Function:
    """What the indices of one function are rewritten with: the ranges of its loops, and those that stay too long."""

    def __init__(self, func: tirx.PrimFunc, too_long: list):
        self.func, self.too_long = func, too_long  # an error that a callback raises would go through TVM

    @functools.cached_property
    def analyzer(self) -> tvm.sym.Analyzer:
        """Knows the ranges of the variables of loops and blocks."""
        analyzer, found = tvm.sym.Analyzer(), {}

        def bind_loop(loop) -> None:
            found[loop.loop_var] = tvm.ir.Range.from_min_extent(loop.min, loop.extent)

        def bind_block(block) -> None:
            found.update((var.var, var.dom) for var in block.iter_vars)

        tvm_ffi.structural_walk(self.func.body, [(tirx.For, bind_loop), (s_tir.SBlock, bind_block)], order="post")
        for var, domain in found.items():
            analyzer.bind(var, domain)
        return analyzer

    def load(self, load):
        indices, is_new = self.rewritten(load.indices)
        return tirx.BufferLoad(load.source, indices) if is_new else load

    def store(self, store):
        (value, *indices), is_new = self.rewritten([store.value, *store.indices])
        return tirx.BufferStore(store.buffer, value, indices) if is_new else store

    def rewritten(self, expressions) -> tuple[list, bool]:
        """The expressions, and whether any is new; one that would grow without end is left, and noted."""

        def bounded(rewrite, expr):
            if self.too_long or _count(expr) > MOST:
                self.too_long.append(expr)
                return expr
            return rewrite(expr)

        rewrites = ((tirx.FloorDiv, _without_shift), (tirx.FloorMod, _remainder_without_shift))
        callbacks = [(kind, functools.partial(bounded, rewrite)) for kind, rewrite in rewrites]
        counts = [_count(x) for x in expressions]
        short = [
            x if count <= LONG or _loads(x) else self.analyzer.simplify(x) for x, count in zip(expressions, counts)
        ]
        new = [tvm_ffi.structural_map(x, callbacks, order="post") if n else x for x, n in zip(short, counts)]
        return new, any(not a.same_as(b) for a, b in zip(new, expressions))


def _count(expr) -> int:
    """How many quotients and remainders an expression has."""
    found: list = []
    kinds = [(tirx.FloorDiv, found.append), (tirx.FloorMod, found.append)]
    tvm_ffi.structural_walk(expr, kinds, order="post")
    return len(found)


def _is_index_arithmetic(expr) -> bool:
    """Whether this is a quotient or remainder by a constant, of loop variables and not of a tensor's elements."""
    if not isinstance(expr.b, tirx.IntImm) or int(expr.b) <= 1:
        return False
    return not _loads(expr.a)


def _loads(expr) -> list:
    """The elements of tensors that an expression reads."""
    loads: list = []
    tvm_ffi.structural_walk(expr, (TensorLoad, loads.append), order="post")
    return loads


def _without_shift(quotient):
    if not _is_index_arithmetic(quotient):
        return quotient
    divisor, dtype = int(quotient.b), str(quotient.ty.dtype)
    terms: list = []
    shifted = tvm.sym.Analyzer().canonical_simplify(quotient.a)
    if isinstance(shifted, tirx.FloorMod):
        shifted = _remainder_without_shift(shifted)
    shift = _collect(shifted, 1, terms)
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


def _remainder_without_shift(remainder):
    """The remainder of a sum without its constant."""
    if not _is_index_arithmetic(remainder):
        return remainder
    divisor, dtype = int(remainder.b), str(remainder.ty.dtype)
    terms: list = []
    shift = _collect(tvm.sym.Analyzer().canonical_simplify(remainder.a), 1, terms) % divisor
    if not terms or not shift and all(factor > 0 for _, factor in terms):
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
