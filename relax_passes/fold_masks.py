"""Fold masks: what a mask or bias takes from constants only becomes a constant, and what is constantly masked a mask.

Preconditions: after `CanonicalizeAttention`, parameters bound as constants, before `LegalizeOps`.  Afterwards an
attention's mask is a constant bool (1 or B, 1 or H, 1 or Sq, 1 or Skv) or absent, its bias a constant or a run-time
float32 or absent.  A mask whose run-time and constant parts cannot be told apart, or that is run-time throughout and
differs by row and column, stays as it is.

A float operand masks where it is -inf, or at least 1e4 below its row's largest value, whose softmax is 0 in float32.
A row of nothing but huge negative values averages in PyTorch: its values stay in the bias.
"""

import functools
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention_composite import AttentionCall, emit_attention, is_attention, match_attention
from relax_passes.attention_patterns import MASKING
from relax_passes.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.closed_expressions import ClosedExpressions
from relax_passes.mask_terms import MaskSplitter, Terms, broadcast, conjunction
from tir_kernels.errors import MaskError

NOTES = "stof.notes"
PARTED_NOTE = (
    "rows whose every key that the constant mask keeps is masked at run time average over those keys, "
    "where PyTorch averages over all keys"
)

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="FoldMasks")
class FoldMasks:
    """Evaluate the input-free part of every attention's mask and bias and bring it into normal form.

    Raises MaskError for NaN or +inf in a mask and for a mask that keeps nothing.  What a user should know about a site
    is recorded in the module attribute `stof.notes`, a list of [site, note].
    """

    def transform_module(self, mod, _ctx):
        return _Folder(mod).transform()


@dataclass(frozen=True)
class Constants:
    """The closed part of a site: what it masks (None: nothing) and adds (None: nothing).

    `is_hard` says that what it masks has weight 0 whatever is added at run time: it was boolean or -inf.
    """

    mask: np.ndarray | None
    bias: np.ndarray | None
    has_averaging_rows: bool
    is_hard: bool


@mutator
class _Folder(PyExprMutator):
    def __init__(self, mod):
        super().__init__(mod)
        self.mod = mod
        self.terms = {}  # (mask, bias) as written -> Terms
        self.constants = {}  # the same -> Constants
        self.shared = {}  # shape, dtype and content -> one relax constant
        self.known = {}  # id of an array -> the same
        self.emitted = {}  # the same as terms, in the present block -> (mask, bias)
        self.notes = []

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self._evaluate(Bindings(function))
            self.builder_.update_func(global_var, self.visit_expr(function))
        mod = self.builder_.get().with_attr(NOTES, self.notes)
        return relax.transform.DeadCodeElimination()(mod)

    def _evaluate(self, bindings):
        """Split the operands of all calls, and evaluate all closed terms in one program."""
        closed = ClosedExpressions(bindings)
        splitter = MaskSplitter(bindings, closed)
        self.terms, sites = {}, {}
        for value in bindings.values.values():
            call = match_attention(self.mod, value)
            if call is not None and (call.mask is not None or call.bias is not None) and _is_static(call):
                terms = splitter.split(call.mask, call.bias)
                if not _is_opaque(terms) and _key(call) not in self.terms:
                    self.terms[_key(call)], sites[_key(call)] = terms, call.site
        closed_terms = [term for terms in self.terms.values() for term in (*terms.closed_keep, *terms.closed_bias)]
        arrays = closed.evaluate([term.expr for term in closed_terms])
        remaining, folded = iter(arrays), {}
        for key, terms in self.terms.items():
            keep, bias = ([(next(remaining), term) for term in part] for part in (terms.closed_keep, terms.closed_bias))
            # Layers that compute the same have the same arrays.
            content = tuple(tuple((id(x), term.shape, term.fill) for x, term in part) for part in (keep, bias))
            if content not in folded:
                folded[content] = _folded(keep, bias, sites[key])
            self.constants[key] = folded[content]

    def visit_dataflow_block_(self, block):
        self.emitted = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding):
        call = match_attention(self.mod, binding.value)
        if call is None or (operands := self._operands(call)) is None:
            super().visit_var_binding_(binding)
            return
        mask, bias = operands
        new = emit_attention(
            self.builder_,
            *(self.visit_expr(x) for x in (call.q, call.k, call.v)),
            mask=mask,
            bias=bias,
            scale=call.scale,
            causal=call.causal,
            site=call.site,
            spelling=call.spelling,
        )
        if not isinstance(binding.var, relax.DataflowVar):
            new = self.builder_.emit_output(new)
        self.set_var_remap(binding.var, new)

    def _operands(self, call: AttentionCall):
        """The new mask and bias of a call, or None where they stay as they are."""
        key = _key(call)
        if key not in self.terms:
            return None
        terms, constants = self.terms[key], self.constants[key]
        if terms.open_bias or terms.open_keep:
            if constants.has_averaging_rows:
                return None
            if constants.mask is not None and not constants.is_hard:
                self.notes.append([call.site, PARTED_NOTE])
        if key not in self.emitted:
            mask = None if constants.mask is None else self._constant(constants.mask)
            self.emitted[key] = mask, self._bias(terms, constants.bias)
        return self.emitted[key]

    def _bias(self, terms: Terms, constant):
        """The constant bias and all open terms added up in float32, smallest first; None if there are none."""
        emit = self.builder_.emit
        summands = []
        if terms.open_keep:
            keep = conjunction(terms.open_keep)
            zero, minus_inf = relax.const(0.0, "float32"), relax.const(float("-inf"), "float32")
            summands.append(emit(op.where(self.visit_expr(keep.expr), zero, minus_inf)))
        for term in terms.open_bias:
            expr = self.visit_expr(term.expr)
            if term.fill is not None:
                expr = op.where(expr, relax.const(0.0, "float32"), relax.const(term.fill, "float32"))
            summands.append(expr if isinstance(expr, relax.Var) else emit(expr))
        if len(summands) + (constant is not None) > 1:
            summands = [x if dtype_of(x) == "float32" else emit(op.astype(x, "float32")) for x in summands]
        if constant is not None:
            summands.append(self._constant(constant))
        total = None
        for summand in sorted(summands, key=lambda x: np.prod(shape_of(x))):
            total = summand if total is None else emit(op.add(total, summand))
        if total is None:
            return None
        shape = shape_of(total)
        return total if len(shape) == 4 else emit(op.reshape(total, (1,) * (4 - len(shape)) + shape))

    def _constant(self, array):
        if id(array) not in self.known:  # of an array that `constants` keeps
            content = array.shape, str(array.dtype), array.tobytes()
            if content not in self.shared:
                self.shared[content] = relax.const(array, str(array.dtype))
            self.known[id(array)] = self.shared[content]
        return self.known[id(array)]


def _folded(keep: list, bias: list, site: str) -> Constants:
    """Of (array, Term) pairs."""
    shaped = [(array.reshape(term.shape), term.fill) for array, term in bias]
    fills = [(array, fill) for array, fill in shaped if fill is not None]
    keeps = [array.reshape(term.shape) for array, term in keep]
    return fold(keeps, [array for array, fill in shaped if fill is None], site, fills)


def fold(keep: list[np.ndarray], bias: list[np.ndarray], site: str, fills=()) -> Constants:
    """Bring closed masks and additive terms into normal form.

    Parameters
    ----------
    keep, bias : lists of bool and of float arrays
        All of `keep` hold where a score is kept; all of `bias` are added to it.  They broadcast to (B, H, Sq, Skv).
    fills : list of (bool array, float)
        Biases of 0 where the array holds and of the number, at most -1e4, elsewhere.

    Raises MaskError, naming `site`, for NaN or +inf, and where nothing is kept.
    """
    bias = [np.asarray(b, np.float32) for b in bias]
    for b in bias:
        if np.isnan(b).any() or np.isposinf(b).any():
            what = "NaN" if np.isnan(b).any() else "+inf"
            raise MaskError(f"attention {site!r}: its mask or bias holds {what}")
    infinite = [~np.isneginf(b) for b in bias if np.isneginf(b).any()]
    mask = _all([*keep, *infinite, *(k for k, fill in fills if np.isneginf(fill))])
    soft = [(k, fill) for k, fill in fills if not np.isneginf(fill)]
    soft_bias = [b for b in bias if ((b <= MASKING) & ~np.isneginf(b)).any()]
    is_hard = not soft and not soft_bias
    filled = _all([mask, *(k for k, _ in soft)])
    if np.array_equal(filled.any(-1), np.broadcast_to(mask.any(-1), filled.shape[:-1])):
        mask = filled
    else:  # some row is filled throughout: its values decide
        expanded = [np.where(k, np.float32(0), np.float32(fill)) for k, fill in soft]
        bias, soft_bias = bias + expanded, soft_bias + expanded
    averages = False
    if soft_bias:
        mask, averages = _mask_what_is_far_below(mask, soft_bias)
    if not mask.any():
        raise MaskError(f"attention {site!r}: its mask keeps nothing")
    rest = None
    for b in bias:
        b = _four_dimensional(b)
        if b.min() <= MASKING:
            b = np.where(mask, b, np.float32(0))
        rest = b if rest is None else rest + b
    if rest is not None:
        rest = _squeezed(rest, axes=range(4)) if rest.any() else None
    return Constants(None if mask.all() else _squeezed(mask, axes=(0, 1)), rest, averages, is_hard)


def _mask_what_is_far_below(mask, biases):
    """`mask` without what the biases put 1e4 below the row's largest, and whether a row has nothing but such values."""
    summands = (np.where(np.isneginf(b), np.float32(0), b) for b in biases)
    total = _four_dimensional(functools.reduce(np.add, summands).astype(np.float32))
    total = np.broadcast_to(total, broadcast(total.shape, mask.shape))
    row_max = np.max(np.where(mask, total, -np.inf), axis=-1, keepdims=True)
    averaging = (row_max <= MASKING) & ~np.isneginf(row_max)
    return mask & (averaging | (total > row_max + MASKING)), bool(averaging.any())


def _all(keeps) -> np.ndarray:
    result = np.ones((1, 1, 1, 1), bool)
    for keep in sorted(keeps, key=lambda k: k.size):
        result = result & keep
    return result


def _squeezed(array: np.ndarray, axes) -> np.ndarray:
    """`array` with length 1 along those of the axes along which nothing changes."""
    for axis in axes:
        first = array.take([0], axis)
        if (array == first).all():
            array = first
    return np.ascontiguousarray(array)


def _four_dimensional(array: np.ndarray) -> np.ndarray:
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _is_opaque(terms: Terms) -> bool:
    """Whether nothing of the mask is closed and it is a run-time pattern over rows and columns."""
    if not terms.open_keep or terms.closed_keep or terms.closed_bias:
        return False
    shape = conjunction(terms.open_keep).shape
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def _is_static(call: AttentionCall) -> bool:
    return all(static_shape(x) is not None for x in (call.q, call.k, call.mask, call.bias) if x is not None)


def _key(call: AttentionCall):
    return call.mask, call.bias
