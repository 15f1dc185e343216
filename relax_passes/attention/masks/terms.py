"""Splitting of masks: a boolean operand into conjuncts, a float operand into summands, each closed or open.

A closed term depends on no input of the model; an open one is known only at run time.  `where(a & b, x, fill)` is x +
where(a, 0, fill) + where(b, 0, fill) for a softmax, so a causal pattern can be split from a padding mask.  The two
differ only in a row in which `b` masks everything that `a` keeps, and only if `fill` is finite.  So only closed parts
are split from open ones (masks/averages.py handles those rows).  A `fill` above -1e8 may not mask at all, and stays
where it is.  Terms keep the smallest shape that broadcasts to the operand's: operators that only spread a mask over
batch or rows are left out.
"""

import math
from dataclasses import dataclass, field, replace

from tvm import relax

from relax_passes.attention.spellings.normal_form import ABSORBING, ASSUMED
from relax_passes.ir.bindings import Bindings, dtype_of, in_dtype, operator, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.floats import keeps_precision
from relax_passes.ir.magnitudes import Magnitudes

op = relax.op


@dataclass(frozen=True)
class Term:
    """A tensor written in variables of the function, and the shape it has.

    With `fill` the tensor is boolean and stands for the float that is 0 where it holds and `fill` elsewhere.
    `is_joint`: this term and another one come from one fill, so the fill counts once where both drop a score.
    """

    expr: relax.Expr
    shape: tuple[int, ...]
    fill: float | None = None
    is_joint: bool = False


@dataclass
class Terms:
    """mask = all of `closed_keep` and `open_keep`; bias = sum of `closed_bias` and `open_bias`."""

    closed_keep: list[Term] = field(default_factory=list)
    open_keep: list[Term] = field(default_factory=list)
    closed_bias: list[Term] = field(default_factory=list)
    open_bias: list[Term] = field(default_factory=list)


class MaskSplitter:
    """Splits the operands of one function's attention calls."""

    def __init__(self, bindings: Bindings, closed: ClosedExpressions, magnitudes: Magnitudes):
        self.bindings = bindings
        self.closed = closed
        self.magnitudes = magnitudes

    def split(self, mask, bias) -> Terms:
        """The terms of an attention's boolean mask and float bias, either of which may be None."""
        terms = Terms()
        if mask is not None:
            for term in self._conjuncts(mask):
                (terms.closed_keep if self._is_closed(term) else terms.open_keep).append(term)
        if bias is not None:
            for term in self._summands(bias):
                (terms.closed_bias if self._is_closed(term) else terms.open_bias).append(term)
        return terms

    def _is_closed(self, term):
        return all(var in self.closed.closed_vars for var in relax.analysis.free_vars(term.expr))

    # -- boolean masks ------------------------------------------------------------------------------------------

    def _conjuncts(self, expr, negate=False) -> list[Term]:
        """Terms whose conjunction is `expr`, or its negation."""
        call = self.bindings.value(expr)
        name = operator(call)
        if name in ("logical_not", "bitwise_not"):
            return self._conjuncts(call.args[0], not negate)
        if name in (("logical_or", "bitwise_or") if negate else ("logical_and", "bitwise_and", "multiply")):
            return self._conjuncts(call.args[0], negate) + self._conjuncts(call.args[1], negate)
        if name in ("equal", "not_equal") and self.bindings.scalar(call.args[1]) == 0:
            is_nonzero = (name == "not_equal") != negate
            if dtype_of(call.args[0]) == "bool":
                return self._conjuncts(call.args[0], not is_nonzero)
            if is_nonzero:
                return self._nonzero(call.args[0])
        if name == "astype" and dtype_of(call.args[0]) == "bool":
            return self._conjuncts(call.args[0], negate)
        if name == "astype" and not negate:
            return self._nonzero(call.args[0])
        if (terms := self._spread(expr, lambda inner: self._conjuncts(inner, negate))) is not None:
            return terms
        return [Term(op.logical_not(expr) if negate else expr, shape_of(expr))]

    def _nonzero(self, expr) -> list[Term]:
        """Terms whose conjunction holds where the numbers in `expr` are not 0."""
        call = self.bindings.value(expr)
        if operator(call) == "multiply" and any(map(self._is_indicator, call.args)):  # other products may underflow
            return self._nonzero(call.args[0]) + self._nonzero(call.args[1])
        if operator(call) == "astype" and dtype_of(call.args[0]) == "bool":
            return self._conjuncts(call.args[0])
        if (terms := self._spread(expr, self._nonzero)) is not None:
            return terms
        return [Term(op.astype(expr, "bool"), shape_of(expr))]

    # -- float masks and biases ---------------------------------------------------------------------------------

    def _summands(self, expr) -> list[Term]:
        """Terms whose sum is `expr`."""
        call = self.bindings.value(expr)
        name = operator(call)
        if name == "add":
            return self._summands(call.args[0]) + self._summands(call.args[1])
        if name == "astype" and "float" in dtype_of(call.args[0]):
            terms = self._summands(call.args[0])
            if keeps_precision(dtype_of(call), dtype_of(call.args[0])):
                return terms
            if len(terms) == 1 and terms[0].fill is not None:  # a narrower dtype may turn the fill into -inf
                return [replace(terms[0], fill=in_dtype(terms[0].fill, dtype_of(call)))]
            return [Term(expr, shape_of(expr))]
        if (spread := self._spread(expr, self._summands)) is not None:
            return spread
        filled = self._filled(call)
        return [Term(expr, shape_of(expr))] if filled is None else self._filled_terms(expr, *filled)

    def _filled_terms(self, expr, keep, base, fill) -> list[Term]:
        """The terms of `expr`, which is `base` (None for 0) where the conjuncts `keep` hold, and `fill` elsewhere."""
        while base is not None and (inner := self._filled(self.bindings.value(base))) and inner[2] == fill:
            keep, base = keep + inner[0], inner[1]
        rest = [] if base is None else self._summands(base)
        by_kind = {True: [], False: []}
        for term in keep:
            by_kind[self._is_closed(term)].append(term)
        # A fill added to a huge value is too low: that is allowed only between a closed and an open term.
        refilled = any(by_kind[self._is_closed(term)] and not self._is_small(term) for term in rest)
        if base is not None and (fill > ABSORBING or refilled):
            return [Term(expr, shape_of(expr))]
        parts = [conjunction(part) for part in by_kind.values() if part]
        return [replace(part, fill=fill, is_joint=len(parts) > 1) for part in parts] + rest

    def _is_small(self, term) -> bool:
        """Whether a fill absorbs the term."""
        return term.fill is None and self.magnitudes.of(term.expr) < -ABSORBING / 10

    def _filled(self, call):
        """(conjuncts, base, fill) of a call that is base (None for 0) where the conjuncts hold, else fill; or None."""
        if operator(call) == "where":
            condition, x, y = call.args
            for base, other, negate in ((x, y, False), (y, x, True)):
                if (fill := self._fill(other)) is not None:
                    base = None if self.bindings.scalar(base) == 0 else base
                    return self._conjuncts(condition, negate), base, fill
        if operator(call) == "multiply":
            for x, factor in ((call.args[0], call.args[1]), (call.args[1], call.args[0])):
                if (fill := self._fill(factor)) in (None, -math.inf):  # 0 * -inf is NaN
                    continue
                if (keep := self._not_indicated(x)) is not None:
                    return keep, None, fill
        return None

    def _fill(self, expr) -> float | None:
        """The number that all elements of `expr` equal, if adding it masks a score; else None."""
        fill = self.bindings.scalar(expr)
        fill = None if fill is None else _absorbing(fill, dtype_of(expr))
        return fill if fill is not None and fill <= ASSUMED else None

    def _not_indicated(self, expr) -> list[Term] | None:
        """Terms whose conjunction holds where `expr` is 0; None unless it is 0 or 1 everywhere."""
        call = self.bindings.value(expr)
        if (
            operator(call) == "subtract"
            and self.bindings.scalar(call.args[0]) == 1
            and self._is_indicator(call.args[1])
        ):
            return self._nonzero(call.args[1])
        if operator(call) == "astype" and dtype_of(call.args[0]) == "bool":
            return self._conjuncts(call.args[0], negate=True)
        return None

    def _is_indicator(self, expr) -> bool:
        """Whether `expr` is 0 or 1 everywhere: a cast of booleans, or a product of such casts."""
        call = self.bindings.value(expr)
        if operator(call) == "astype":
            return dtype_of(call.args[0]) == "bool" or self._is_indicator(call.args[0])
        if operator(call) == "multiply":
            return self._is_indicator(call.args[0]) and self._is_indicator(call.args[1])
        inner = self._repeated(expr)
        inner = self._reshaped(expr) if inner is None else inner
        return inner is not None and self._is_indicator(inner)

    # -- shapes -------------------------------------------------------------------------------------------------

    def _spread(self, expr, split) -> list[Term] | None:
        """The terms of `expr` if it repeats or reshapes an operand, which `split` takes apart; else None."""
        if (inner := self._repeated(expr)) is not None:
            rank = len(shape_of(expr))
            return [_in_shape(term, (1,) * (rank - len(term.shape)) + term.shape) for term in split(inner)]
        if (inner := self._reshaped(expr)) is None:
            return None
        terms = split(inner)
        shapes = [_reshape(term.shape, static_shape(inner), static_shape(expr)) for term in terms]
        return None if None in shapes else [_in_shape(term, shape) for term, shape in zip(terms, shapes)]

    def _repeated(self, expr):
        """The operand that `expr` repeats along dimensions of size 1, or None."""
        call = self.bindings.call(expr, "broadcast_to", "tile", "repeat")
        if call is None or static_shape(call.args[0]) is None or static_shape(call) is None:
            return None
        before, after = shape_of(call.args[0]), shape_of(call)
        aligned = (1,) * (len(after) - len(before)) + before
        return call.args[0] if all(n in (1, m) for n, m in zip(aligned, after)) else None

    def _reshaped(self, expr):
        """The expression that `expr` reshapes, or None; merging dimensions and splitting them again is skipped."""
        inner = source = self.bindings.same_elements(expr)
        while source is not None:
            if _not_one(source) == _not_one(expr):
                inner = source
            source = self.bindings.same_elements(source)
        return inner


def conjunction(terms: list[Term]) -> Term:
    """The conjunction of boolean terms, smallest first, so that intermediate results stay small."""
    first, *others = sorted(terms, key=lambda term: math.prod(term.shape))
    for term in others:
        first = Term(op.logical_and(first.expr, term.expr), broadcast(first.shape, term.shape))
    return first


def broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that two shapes broadcast to."""
    rank = max(len(a), len(b))
    pairs = zip((1,) * (rank - len(a)) + a, (1,) * (rank - len(b)) + b)
    return tuple(max(n, m) for n, m in pairs)


def _absorbing(fill: float, dtype: str) -> float:
    """The least float32 for a fill near the least of a narrow dtype, as both absorb any score; else `fill`."""
    least = {"float16": -65504.0, "bfloat16": -3.3895313892515355e38}.get(dtype)
    return -3.4028234663852886e38 if least is not None and least <= fill <= least / 2 else fill


def _in_shape(term: Term, shape) -> Term:
    return term if shape == term.shape else replace(term, expr=op.reshape(term.expr, shape), shape=shape)


def _reshape(sizes, before, after) -> tuple[int, ...] | None:
    """The shape of a term of shape `sizes`, which broadcasts to `before`, after `before` was reshaped to `after`.

    The term must have merged or split dimensions all in full length or all as 1; else the result is None.
    """
    sizes = (1,) * (len(before) - len(sizes)) + tuple(sizes)
    result, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        first_i, first_j = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (n := math.prod(before[first_i:i])) != (m := math.prod(after[first_j:j])):
            i, j = (i + 1, j) if n < m else (i, j + 1)
        given = [(size, full) for size, full in zip(sizes[first_i:i], before[first_i:i]) if full != 1]
        if all(size == full for size, full in given):
            result += after[first_j:j]
        elif all(size == 1 for size, _ in given):
            result += [1] * (j - first_j)
        else:
            return None
    return tuple(result)


def _not_one(expr):
    return [n for n in shape_of(expr) if n != 1]
