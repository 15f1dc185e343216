"""Fold masks: the constant part of a mask or bias is evaluated, and constant biases that mask become masks.

Preconditions: after `CanonicalizeAttention` and `RowsOfCaches`, parameters bound as constants, before `LegalizeOps`.
Attentions with positions keep their bias; their masks are biases already.  Afterwards an
attention's mask is a constant bool (1 or B, 1 or H, 1 or Sq, 1 or Skv) or absent, its bias a constant or a run-time
float32 or absent.  A mask whose run-time and constant parts cannot be told apart stays as it is.

A float operand masks where it is -inf, or so far below its row's largest value that no score can make up for it.  That
distance follows from the bound of the scores' magnitude (magnitudes.py).  Without a bound the distance is 1e8, and the
report gets a note unless the value is 1e30 below.  Values closer to the largest stay in the bias, which is exact.  The
values of a row that holds only huge negative ones stay there, too: PyTorch averages such a row.

PyTorch may give NaN for a row in which the model's own mask or bias leaves only -inf.  A `where` after the call then
gives NaN, too, for rows that are empty by a constant mask or at run time.  In the same way, masks/averages.py gives
PyTorch's result for rows in which a constant and a run-time mask leave only finite fills.  Beside a mask or a rule of
the user's such rows are 0: there the run-time mask is filled with -inf, so that the kernel finds them, whatever keys
it is left with.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.composite import NOTES, AttentionCall, emit_attention, is_attention, match_attention
from relax_passes.attention.masks.averages import (
    PartedFill,
    emit_averages,
    emit_emptied_rows,
    highest_dropped,
    parted_fill,
)
from relax_passes.attention.masks.constants import Constants, fold
from relax_passes.attention.masks.terms import MaskSplitter, Terms, conjunction
from relax_passes.attention.site_names import named
from relax_passes.attention.spellings.normal_form import ABSORBING, ASSUMED, ASSUMED_NOTE, UNDERFLOW
from relax_passes.ir.bindings import Bindings, dtype_of, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.magnitudes import Magnitudes
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.legalizations.closed_values import closed_values
from tir_kernels.errors import UnsupportedError

PARTED_NOTE = (
    "rows whose every key that the constant mask keeps is masked at run time are weighed over those keys, "
    "where PyTorch also weighs keys that the constant mask drops by a finite fill"
)
LARGEST_SUMS = 1 << 26  # elements of a dense mask beside which the sums of biases are made in float64
AVERAGED_NOTE = "rows whose every key is masked average, as in PyTorch with scores within ±{:g}"

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="FoldMasks")
class FoldMasks:
    """Evaluate the input-free part of every attention's mask and bias and bring it into normal form.

    Raises MaskError for NaN or +inf in a mask and for a mask that keeps nothing.  Notes to the user are recorded in the
    module attribute `stof.notes`, a list of [site, note].

    Parameters
    ----------
    given_for : callable
        Maps a site's path, sizes (B, H, Sq, Skv) and first row (or None) to the mask that the user gave for the site,
        or to None.
    replaceable : bool
        The user may give other masks after the build.  UnsupportedError for a site whose own mask or bias has another
        normal form beside another mask.
    rule_for : callable
        Maps a site's path to the SiteRule that finds what is kept of the given mask in each call, or to None.
    """

    def __init__(
        self,
        given_for: Callable = lambda path, sizes, first_row: None,
        replaceable: bool = False,
        rule_for: Callable = lambda path: None,
    ):
        self.given_for = given_for
        self.replaceable = replaceable
        self.rule_for = rule_for

    def transform_module(self, mod, _ctx):
        # Beside no mask the most is masked: if that is the same as what -inf masks, so it is beside any mask.
        given_for = (lambda path, sizes, first_row: None) if self.replaceable else self.given_for
        return _Folder(mod, given_for, self.replaceable, self.rule_for).transform()


@mutator
class _Folder(PyExprMutator):
    def __init__(self, mod, given_for, replaceable: bool, rule_for):
        super().__init__(mod)
        self.mod = mod
        self.given_for = given_for
        self.replaceable = replaceable
        self.rule_for = rule_for
        # A key is what `_key` returns: the mask and the bias of calls, the bound of their scores, the user's mask, and
        # whether a rule finds what is kept of it.  Calls with positions have none: their mask is part of the bias, and
        # stays as it is.
        self.terms = {}  # key -> Terms
        self.constants = {}  # key -> Constants
        self.parted: dict[tuple, PartedFill | None] = {}  # key -> its parted fill, if it has one
        self.dropped = {}  # key -> the highest constant sum that is masked
        self.magnitudes: Magnitudes  # of values in the function that is being rewritten
        self.shared = {}  # shape, dtype and content -> one relax constant
        self.known = {}  # id of an array -> the array and its relax constant
        self.emitted = {}  # key -> (mask, bias) emitted in the block that is being visited
        self.empty = {}  # key -> whether each row is empty at run time
        self.emptied = {}  # key -> (run-time mask, whether each row has nothing but fills)
        self.notes = []

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self._evaluate(Bindings(function))
            with closing_blocks(self.builder_):
                self.builder_.update_func(global_var, self.visit_expr(function))
        before = self.mod.attrs[NOTES] if self.mod.attrs and NOTES in self.mod.attrs else []
        mod = self.builder_.get().with_attr(NOTES, [*before, *self.notes])
        return relax.transform.DeadCodeElimination()(mod)

    def _evaluate(self, bindings):
        """Split the operands of all calls, and evaluate all closed terms in one program."""
        closed = ClosedExpressions(bindings)
        self.magnitudes = Magnitudes(bindings)
        splitter = MaskSplitter(bindings, closed, self.magnitudes)
        self.terms, sites, lengths, split = {}, {}, {}, {}
        for value in bindings.values.values():
            call = match_attention(self.mod, value)
            if call is None or call.positions is not None or (call.mask is None and call.bias is None):
                continue
            if _is_static(call):
                operands = call.mask, call.bias
                if operands not in split:
                    split[operands] = splitter.split(*operands)
                key = self._key(call)
                if key not in self.terms:
                    self.terms[key], sites[key] = split[operands], call.site
                    lengths[key] = shape_of(call.q)[2], shape_of(call.k)[2]
        closed_terms = [term for terms in self.terms.values() for term in (*terms.closed_keep, *terms.closed_bias)]
        arrays = closed_values(bindings, [term.expr for term in closed_terms])
        remaining, folded = iter(arrays), {}
        for key, terms in self.terms.items():
            keep, bias = ([(next(remaining), term) for term in part] for part in (terms.closed_keep, terms.closed_bias))
            # Equal masks of several layers are the same arrays, so they are folded once.
            gap = self._gap(key, terms)
            content = (
                gap,
                key[3:],
                *(tuple((id(x), term.shape, term.fill) for x, term in part) for part in (keep, bias)),
            )
            if content not in folded:
                given = None if key[3] is None else functools.partial(_known_to_keep, key[3], key[4], *lengths[key])
                folded[content] = _folded(keep, bias, sites[key], gap, given)
            self.constants[key] = folded[content]
            constants = folded[content]
            if self.replaceable:
                _check_replaceable(sites[key], terms, constants)
            self.parted[key] = parted_fill(terms, bias, constants.mask, key[3] is None)
            if terms.open_bias and constants.mask is not None and not constants.is_hard and self.parted[key] is None:
                self.dropped[key] = highest_dropped(bias, constants.mask)

    def _key(self, call: AttentionCall):
        """The mask and the bias of a call, a bound of its scores, the user's mask, and whether a rule is within it."""
        bound = call.scale * self.magnitudes.of_scores(call.q, call.k)
        bound = bound if call.softcap is None else min(bound, call.softcap)
        # The bound is rounded to two digits, so that more layers have equal keys.
        bound = bound if math.isinf(bound) else float(f"{1.05 * bound:.1e}")
        given = self.given_for(call.site, call.mask_sizes, call.first_row)
        return call.mask, call.bias, bound, given, self.rule_for(call.site) is not None

    def _gap(self, key, terms: Terms) -> float:
        """Distance below its row's largest value at which a constant has weight 0; -ASSUMED if no bound is known."""
        summands = sum(self.magnitudes.of(term.expr) for term in terms.open_bias if term.fill is None)
        return min(2 * (key[2] + summands) + UNDERFLOW, -ASSUMED)

    def visit_dataflow_block_(self, block):
        self.emitted, self.empty, self.emptied = {}, {}, {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding):
        call = match_attention(self.mod, binding.value)
        if call is None or (operands := self._operands(call)) is None:
            super().visit_var_binding_(binding)
            return
        mask, bias = operands
        q, k, v = (self.visit_expr(x) for x in (call.q, call.k, call.v))
        new = emit_attention(
            self.builder_,
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            sink=None if call.sink is None else self.visit_expr(call.sink),
            positions=None if call.positions is None else self.visit_expr(call.positions),
            scale=call.scale,
            softcap=call.softcap,
            causal=call.causal,
            first_row=call.first_row,
            site=call.site,
            spelling=call.spelling,
        )
        if call.empty_rows == "nan" and (empty := self._empty_rows(call, bias)) is not None:
            nan = relax.const(float("nan"), dtype_of(new))
            new = self.builder_.emit(op.where(empty, nan, new))
        if self._is_parted(call, mask, bias):
            new = self._averaged(call, v, new)
        if self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar):
            new = self.builder_.emit_output(new)
        self.set_var_remap(binding.var, new)

    def _empty_rows(self, call: AttentionCall, bias):
        """Bool (1 or B, 1 or H, 1 or Sq, 1): rows of nothing but -inf; None where there is none."""
        if call.positions is not None:
            return None if bias is None else self._emit_run_time_rows(None, bias)
        key = self._key(call)
        if key not in self.empty:
            hard = self.constants[key].hard  # the other scores that the mask drops were filled with finite numbers
            summands = self.terms[key].open_bias
            # What has a bound holds no -inf, unless it overflows; a finite fill may be one for the kernel only.
            if summands and all(self._is_finite(term) for term in summands):
                bias = None
            self.empty[key] = self._emit_empty_rows(None if hard is None else self._constant(hard), bias)
        return self.empty[key]

    def _is_finite(self, term) -> bool:
        """Whether what a term adds is known to be finite."""
        return math.isfinite(self.magnitudes.of(term.expr) if term.fill is None else term.fill)

    def _emit_empty_rows(self, mask, bias):
        if bias is None or isinstance(bias, GenericConst):  # the -inf of a constant bias are in the mask
            if mask is None:
                return None
            empty = ~mask.value.numpy().any(-1, keepdims=True)
            return self._constant(empty) if empty.any() else None
        return self._emit_run_time_rows(mask, bias)

    def _emit_run_time_rows(self, mask, bias):
        emit = self.builder_.emit
        minus_inf = relax.const(float("-inf"), "float32")
        bias = emit(op.astype(bias, "float32")) if dtype_of(bias) != "float32" else bias
        kept = emit(op.not_equal(bias, minus_inf))
        kept = emit(op.astype(kept if mask is None else emit(op.logical_and(mask, kept)), "int32"))
        # The largest bias does not tell empty rows: TVM's maximum of nothing but -inf is finfo.min.
        return emit(op.equal(emit(op.max(kept, axis=-1, keepdims=True)), relax.const(0, "int32")))

    def _is_parted(self, call, mask, bias) -> bool:
        """Whether the constant mask stands for a finite fill, beside a run-time mask.

        False if there is a sink, which then gets the weight of rows of nothing but fills.
        """
        if mask is None or bias is None or call.sink is not None:
            return False
        terms, constants = self.terms[self._key(call)], self.constants[self._key(call)]
        return bool(terms.open_bias or terms.open_keep) and not constants.is_hard and constants.mask is not None

    def _averaged(self, call, v, out):
        """`out` with PyTorch's result in rows of nothing but fills; where it is not known, `out` and perhaps a note."""
        key, emit = self._key(call), self.builder_.emit
        parted = self.parted[key]
        if parted is None:
            if not self.dropped[key] + self._gap(key, self.terms[key]) <= self._run_time_fill(key):
                self.notes.append([call.site, PARTED_NOTE])
            return out
        if key[3] is not None:  # what the kernel gives for rows of nothing
            return out
        if key not in self.emptied:
            run_time = self._four_dimensional(self.visit_expr(parted.run_time.expr))
            self.emptied[key] = run_time, emit_emptied_rows(emit, parted.keep, run_time)
        run_time, empty = self.emptied[key]
        if parted.fill > ABSORBING:
            self.notes.append([call.site, AVERAGED_NOTE.format(parted.absorbed)])
        return emit_averages(emit, parted, run_time, empty, v, out)

    def _run_time_fill(self, key) -> float:
        """The sum of the fills of run-time masks; NaN if there is a run-time bias without a known bound."""
        terms = self.terms[key].open_bias
        if any(term.fill is None and math.isinf(self.magnitudes.of(term.expr)) for term in terms):
            return math.nan
        return sum(term.fill for term in terms if term.fill is not None)

    def _four_dimensional(self, expr):
        expr = expr if isinstance(expr, relax.Var | GenericConst) else self.builder_.emit(expr)
        shape = shape_of(expr)
        return expr if len(shape) == 4 else self.builder_.emit(op.reshape(expr, (1,) * (4 - len(shape)) + shape))

    def _operands(self, call: AttentionCall):
        """The new mask and bias of a call, or None where they stay as they are."""
        if call.positions is not None:  # its own mask is a bias
            return None, None if call.bias is None else self.visit_expr(call.bias)
        if not _is_static(call):
            return None
        key = self._key(call)
        if key not in self.terms:
            return None
        terms, constants = self.terms[key], self.constants[key]
        if terms.open_bias or terms.open_keep:
            # A constant fill may replace scores that a boolean masks at run time: these two must not be split.
            refilled = _varies_both_ways(terms) and constants.mask is not None and not constants.is_hard
            if refilled or constants.has_averaging_rows and call.mask is not None:
                return None
            # A run-time mask of -inf, or of a lower fill, may leave a row only finite fills of the constant mask.
            # If the average of such a row is not known, the operands stay as they are.
            is_hard = bool(terms.open_keep) or any(term.fill == -math.inf for term in terms.open_bias)
            has_fills = constants.mask is not None and not constants.is_hard
            if has_fills and self.parted[key] is None and call.sink is None:
                if is_hard or self._run_time_fill(key) < self.dropped[key]:
                    return None
            if constants.has_averaging_rows:
                return tuple(None if x is None else self.visit_expr(x) for x in (call.mask, call.bias))
        if constants.assumed is not None:
            self.notes.append([call.site, ASSUMED_NOTE.format(-constants.assumed, constants.assumed / 2)])
        if key not in self.emitted:
            mask = None if constants.mask is None else self._constant(constants.mask)
            if constants.bias is None and self._is_one_half(terms, call.bias):
                bias = self._four_dimensional(self.visit_expr(call.bias))
            else:
                is_hard = key[3] is not None and self.parted[key] is not None
                bias = self._bias(terms, constants.bias, is_hard)
            self.emitted[key] = mask, bias
        return self.emitted[key]

    def _is_one_half(self, terms: Terms, bias) -> bool:
        """Whether the model adds up all of `bias` at run time in half precision: it is stored as it is."""
        if terms.open_keep or len(terms.open_bias) < 2 or any(term.fill is not None for term in terms.open_bias):
            return False
        dtypes = {dtype_of(self.builder_.normalize(term.expr)) for term in terms.open_bias} | {dtype_of(bias)}
        shape = np.broadcast_shapes(*(term.shape for term in terms.open_bias))
        return len(dtypes) == 1 and dtypes <= {"float16", "bfloat16"} and math.prod(shape) == math.prod(shape_of(bias))

    def _bias(self, terms: Terms, constant, is_hard: bool):
        """The constant bias and all open terms added up in float32, smallest first; None if there are none.

        `is_hard`: all fills are -inf.
        """
        emit = self.builder_.emit
        summands = []
        if terms.open_keep:
            keep = conjunction(terms.open_keep)
            zero, minus_inf = relax.const(0.0, "float32"), relax.const(float("-inf"), "float32")
            summands.append(emit(op.where(self.visit_expr(keep.expr), zero, minus_inf)))
        for term in terms.open_bias:
            expr = self.visit_expr(term.expr)
            if term.fill is not None:
                fill = relax.const(-math.inf if is_hard else term.fill, "float32")
                expr = op.where(expr, relax.const(0.0, "float32"), fill)
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
        return self._four_dimensional(total)

    def _constant(self, array):
        if id(array) not in self.known:
            content = array.shape, str(array.dtype), array.tobytes()
            if content not in self.shared:
                self.shared[content] = relax.const(array, str(array.dtype))
            self.known[id(array)] = array, self.shared[content]  # the array, too: its id must not become another's
        return self.known[id(array)][1]


def _check_replaceable(site: str, terms: Terms, constants: Constants) -> None:
    """UnsupportedError unless a site's own mask and bias have the same normal form beside every mask of a user's."""
    fills = [term.fill for term in (*terms.closed_bias, *terms.open_bias) if term.fill not in (None, -math.inf)]
    if fills or not constants.is_hard or constants.has_averaging_rows:
        raise UnsupportedError(
            f"attention {named(site)} masks by finite numbers, whose meaning depends on the mask that is given beside "
            "them: its mask cannot be replaced (boolean masks and -inf can); leave replaceable_masks out"
        )


def _folded(keep: list, bias: list, site: str, gap: float, given) -> Constants:
    """The normal form of the closed masks and biases that the (array, Term) pairs hold."""
    shaped = [(array.reshape(term.shape), term.fill) for array, term in bias]
    fills = [(array, fill) for array, fill in shaped if fill is not None]
    keeps = [array.reshape(term.shape) for array, term in keep]
    return fold(keeps, [array for array, fill in shaped if fill is None], site, fills, gap, given)


def _known_to_keep(given, has_rule: bool, q_len: int, kv_len: int) -> np.ndarray | None:
    """The pairs that are kept for certain of the user's mask, bool (Sq, Skv) or (B or 1, H or 1, Sq, Skv).

    None where that is not known: a rule may keep less of the mask in each call, or a dense mask would be too large.
    """
    return None if has_rule or q_len * kv_len > LARGEST_SUMS else given.dense(q_len, kv_len).numpy()


def _varies_both_ways(terms: Terms) -> bool:
    """Whether the boolean mask that is known only at run time differs by row and by column."""
    if not terms.open_keep:
        return False
    shape = conjunction(terms.open_keep).shape
    return len(shape) >= 2 and shape[-1] > 1 and shape[-2] > 1


def _is_static(call: AttentionCall) -> bool:
    return all(static_shape(x) is not None for x in (call.q, call.k, call.mask, call.bias) if x is not None)
