"""Canonicalize attention: softmax(q kᵀ · s + M) v written by hand becomes the composite, with heads not repeated.

Preconditions: parameters are bound as constants; before `FoldMasks` and `LegalizeOps`.  The spans of softmaxes, and of
other operators at the centre of an attention (spellings/softmax.py), name the module path.

A softmax between two products that the composite cannot express stays as it is.  It is recorded with the reason in the
module attribute `stof.not_rewritten`, a list of [site, reason].  Assumptions about a site are recorded in the same way
in `stof.notes`.
"""

import math

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.composite import NOTES, emit_attention, is_attention, match_attention
from relax_passes.attention.refusals.other_attention import (
    OTHER_WEIGHTS,
    behind_products,
    other_weights,
    products_before,
)
from relax_passes.attention.refusals.own_scores import OWN_SCORES, is_masked_by_scores
from relax_passes.attention.refusals.plain_weights import plain_weights
from relax_passes.attention.refusals.stray_weights import stray_weights
from relax_passes.attention.repeated_heads import KeysOrValues, emit_keys_and_values, reshaped, unrepeated
from relax_passes.attention.sinks.logits import Sink
from relax_passes.attention.spellings.normal_form import Fill
from relax_passes.attention.spellings.patterns import AttentionMatch, Known, match_softmax, site_of
from relax_passes.attention.spellings.softmax import find_softmax
from relax_passes.attention.spellings.steps import LARGEST_HALF, NotAttention
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.open_blocks import closing_blocks

NOT_REWRITTEN = "stof.not_rewritten"
LEAST_FACTOR = 1 / 16  # of half precision: smaller ones take bits from numbers near its least
READ_SCORES = "its scores have another reader than its softmax, or are an output of the model"

op = relax.op


@tvm.transform.module_pass(opt_level=0, name="CanonicalizeAttention")
class CanonicalizeAttention:
    """Bring every spelling of attention into the composite form."""

    def transform_module(self, mod, _ctx):
        return _Canonicalizer(relax.transform.DeadCodeElimination()(mod)).transform()


@mutator
class _Canonicalizer(PyExprMutator):
    def __init__(self, mod):
        super().__init__(mod)
        self.mod = mod
        self.bindings: Bindings  # of the function that is being visited
        self.matches = {}  # variable bound to the product with v -> AttentionMatch
        self.products = set()  # variables bound to products that lead to a softmax, matched or refused
        self.judged = set()  # variables bound to softmaxes that were matched or refused
        self.known: Known  # of the function that is being visited
        self.refused = []
        self.notes = []

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self.bindings = Bindings(function)
            self.known = known = Known(self.bindings)
            self._match(known)
            self._refuse_other_attention(known)
            for match in self._with_escaping_scores():
                self._refuse(match, READ_SCORES)
            for match in [x for x in self.matches.values() if is_masked_by_scores(self.bindings, x, known.is_closed)]:
                self._refuse(match, OWN_SCORES)
            self.notes += [[match.site, note] for match in self.matches.values() for note in match.form.notes]
            with closing_blocks(self.builder_):
                self.builder_.update_func(global_var, self.visit_expr(function))
        mod = self.builder_.get().with_attr(NOT_REWRITTEN, self.refused).with_attr(NOTES, self.notes)
        return relax.transform.DeadCodeElimination()(mod)

    def _match(self, known: Known):
        for var, value in self.bindings.values.items():
            site = site_of(value) if isinstance(value, relax.Call) else ""
            try:
                softmax = find_softmax(self.bindings, var)
                match = None if softmax is None else match_softmax(self.bindings, softmax, known)
            except NotAttention as refusal:
                self.refused.append([site, str(refusal)])
            else:
                if match is None:
                    continue
                self.matches[match.out] = match
            self.judged.add(var)
            self.products.update(products_before(self.bindings, value))

    def _refuse(self, match: AttentionMatch, reason: str):
        self.refused.append([match.site, reason])
        del self.matches[match.out]

    def _with_escaping_scores(self) -> list[AttentionMatch]:
        """The matches whose scores also reach the function's results by a way around the match.

        A mask drops scores in the softmax only.  Another reader of the scores, such as a gate, or a logsumexp that
        merges parts, would use the scores without the mask.
        """
        variables = {value: var for var, value in self.bindings.values.items()}
        found = []
        for match in self.matches.values():
            pending, seen = [variables[match.scores]], set(self.matches)
            while pending:
                var = pending.pop()
                if var in self.bindings.outputs:
                    found.append(match)
                    break
                here = {*self.bindings.readers[var]} - seen
                seen |= here
                pending += here
        return found

    def _refuse_other_attention(self, known: Known):
        """Record attentions that no match covers.

        Their weights are the scores themselves, or scores after a nonlinearity other than softmax, or weights that meet
        the values in another way than by a product.
        """
        origins, results = known.origins, set(self._results())
        for var, value in self.bindings.values.items():
            if operator(value) != "matmul":
                continue
            is_known = var in self.products
            name = None if is_known else other_weights(self.bindings, var)
            if name is not None:
                self.refused.append([site_of(value), OTHER_WEIGHTS.format(name)])
            elif var not in results and (found := plain_weights(self.bindings, var, origins, not is_known)):
                out, reason = found
                self.refused.append([site_of(value), reason])
                results.add(out)
            else:
                continue
            self.products.add(var)
        judged = self.judged | behind_products(self.bindings, self.products)
        for var, value in self.bindings.values.items():
            if var not in judged:
                stray = stray_weights(self.bindings, var, origins, results)
                self.refused += (
                    [[site_of(value), stray]] if stray and not self._is_refused_already(site_of(value)) else []
                )

    def _is_refused_already(self, site: str) -> bool:
        """Whether a refusal with the module path of `site` is recorded; `site` may be a part of that attention."""
        return any(other.partition("#")[0] == site.partition("#")[0] for other, _ in self.refused)

    def _results(self):
        """The variables of products with v: the last variable of each match, or the variables that it reads."""
        for out in self.matches:
            is_product = operator(self.bindings.value(out)) == "matmul"
            yield from [out] if is_product else relax.analysis.free_vars(self.bindings.value(out))

    def visit_var_binding_(self, binding):
        new = None
        if binding.var in self.matches:
            new = self._emit_match(self.matches[binding.var], binding.value)
        elif (call := match_attention(self.mod, binding.value)) is not None:
            new = self._with_kv_heads(call)
        if new is None:
            super().visit_var_binding_(binding)
        else:
            if self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar):
                new = self.builder_.emit_output(new)
            self.set_var_remap(binding.var, new)

    def _with_kv_heads(self, call):
        """The call with k and v before their heads were repeated, or None if they were not."""
        k_shape, v_shape = static_shape(call.k), static_shape(call.v)
        if k_shape is None or v_shape is None:
            return None
        (batch, _, length, k_dim), (*_, v_dim) = k_shape, v_shape
        k = unrepeated(self.bindings, call.k, batch, length, k_dim)
        v = unrepeated(self.bindings, call.v, batch, length, v_dim)
        if k.group == 1 or (k.heads, k.group) != (v.heads, v.group):
            return None
        dims = (k_dim, v_dim)
        kv = emit_keys_and_values(self.builder_.emit, self.visit_expr, k, v, call.k, call.v, batch, length, dims)
        mask, bias, sink = (None if x is None else self.visit_expr(x) for x in (call.mask, call.bias, call.sink))
        return emit_attention(
            self.builder_,
            self.visit_expr(call.q),
            *kv,
            mask=mask,
            bias=bias,
            sink=sink,
            scale=call.scale,
            softcap=call.softcap,
            causal=call.causal,
            empty_rows=call.empty_rows,
            site=call.site,
            spelling=call.spelling,
        )

    def _emit_match(self, match: AttentionMatch, product):
        """Emit the composite for a match and give it the shape and dtype of the product that it replaces."""
        lead, (q_len, kv_len) = match.scores_shape[:-2], match.scores_shape[-2:]
        batch, heads = match.batch_and_heads or ((*lead, 1)[0], math.prod(lead[1:]))
        emit = self.builder_.emit
        dim, v_dim = shape_of(match.q)[-1], shape_of(product)[-1]
        q = reshaped(emit, self.visit_expr(match.q), (batch, heads, q_len, dim))
        v = unrepeated(self.bindings, match.v, batch, kv_len, v_dim)
        if match.k_is_transposed:
            rank = len(shape_of(match.k))
            axes = [*range(rank - 2), rank - 1, rank - 2]
            plain_k = emit(op.permute_dims(self.visit_expr(match.k), axes))
            k = KeysOrValues(plain_k, False, math.prod(shape_of(match.k)) // (batch * kv_len * dim), 1)
        else:
            plain_k = match.k
            k = unrepeated(self.bindings, match.k, batch, kv_len, dim)
        k, v = emit_keys_and_values(emit, self.visit_expr, k, v, plain_k, match.v, batch, kv_len, (dim, v_dim))
        q, k, v = self._with_factors(match, (batch, heads), q, k, v)
        if len({dtype_of(x) for x in (q, k, v)}) > 1:
            q, k, v = (_cast(emit, x, "float32") for x in (q, k, v))
        mask, bias = self._mask_and_bias(match, (batch, heads))
        sink = None if match.sink is None else self._sink(match.sink, heads)
        out = emit_attention(
            self.builder_,
            q,
            k,
            v,
            mask=mask,
            bias=bias,
            sink=sink,
            scale=match.form.scale,
            softcap=match.form.softcap,
            empty_rows=match.empty_rows,
            site=match.site,
            spelling=match.spelling,
        )
        return _cast(emit, reshaped(emit, out, static_shape(product)), dtype_of(product))

    def _with_factors(self, match, batch_and_heads, q, k, v):
        """(q, k, v), q or k times what multiplies all scores of a head, a query or a key."""
        emit = self.builder_.emit
        bounds = {"q": self.known.magnitudes.of(match.q), "k": self.known.magnitudes.of(match.k)}
        for step in match.form.steps:
            if step.kind != "factor":
                continue
            factors = self._broadcastable(self.visit_expr(step.operand), step.shape, batch_and_heads)
            batch, heads, rows, columns = shape_of(factors)
            side = "q" if columns == 1 else "k"
            bounds[side] *= self._largest_factor(step)
            is_bounded = bounds[side] <= LARGEST_HALF
            if side == "q":
                q = self._multiplied(q, factors, step, is_bounded)
                continue
            if 1 < heads != shape_of(k)[1]:
                k, v = (emit(op.repeat(x, heads // shape_of(k)[1], axis=1)) for x in (k, v))
            factors = reshaped(emit, factors, (batch, heads, columns, rows))
            k = self._multiplied(k, factors, step, is_bounded)
        return q, k, v

    def _largest_factor(self, step) -> float:
        """The largest of constant factors; inf where they are not known, divide, or are so small that much is lost."""
        if step.negate or not self.known.is_closed(step.operand):
            return math.inf
        factors = np.abs(self.known.values([step.operand])[0].astype(np.float64))
        return float(factors.max(initial=0.0)) if (factors >= LEAST_FACTOR).all() else math.inf

    def _multiplied(self, x, factors, step, is_bounded: bool):
        """`x` times or divided by factors; in float32 where it would lose range, or precision that the scores have."""
        emit = self.builder_.emit
        dtype = dtype_of(x)
        result = emit((op.divide if step.negate else op.multiply)(*(_cast(emit, y, "float32") for y in (x, factors))))
        has_range = dtype == "bfloat16" or (dtype == "float16" and is_bounded)
        return _cast(emit, result, dtype) if has_range and dtype == step.dtype else result

    def _mask_and_bias(self, match, batch_and_heads):
        """The mask and the bias that a match's operations give; either is None if no operation needs it."""
        emit = self.builder_.emit
        mask, bias = None, None
        for operation in match.form.operations:
            step = operation.step if isinstance(operation, Fill) else operation
            operand = None
            if step.operand is not None:
                operand = self._broadcastable(self.visit_expr(step.operand), step.shape, batch_and_heads)
                if step.negate:
                    operand = emit((op.negative if step.kind == "add" else op.logical_not)(operand))
            if isinstance(operation, Fill):
                mask, bias = self._filled(mask, bias, operand, operation.value)
            elif step.kind == "add":
                bias = self._sum(bias, operand)
            elif step.kind == "scale" and bias is not None:
                bias = emit(op.multiply(bias, relax.const(step.number, dtype_of(bias))))
            elif step.kind == "cast" and step.dtype == "float16" and bias is not None:
                bias = _cast(emit, _cast(emit, bias, "float16"), "float32")  # numbers below its range become -inf
            elif step.kind == "floor":
                if bias is not None:
                    bias = emit(op.maximum(_cast(emit, bias, "float32"), relax.const(step.number, "float32")))
                if mask is not None:  # from here on, a finite fill replaces the -inf of masked scores
                    mask, bias = self._filled(None, bias, mask, step.number)
        return mask, bias

    def _filled(self, mask, bias, keep, value):
        """Mask and bias after a fill: -inf masks scores; a finite value goes into the bias and unmasks them."""
        emit = self.builder_.emit
        if value == -math.inf:
            return (keep if mask is None else emit(op.logical_and(mask, keep))), bias
        if mask is not None:
            mask = emit(op.logical_or(mask, emit(op.logical_not(keep))))
        bias = relax.const(0.0, "float32") if bias is None else _cast(emit, bias, "float32")
        return mask, emit(op.where(keep, bias, relax.const(value, "float32")))

    def _sink(self, sink: Sink, heads: int):
        """The logits of all heads, (H,)."""
        if isinstance(sink.logits, float):
            return relax.const(np.full(heads, sink.logits, "float32"))
        emit = self.builder_.emit
        if not sink.is_of_heads:
            return emit(op.broadcast_to(reshaped(emit, self.visit_expr(sink.logits), (1,)), (heads,)))
        logits = reshaped(emit, self.visit_expr(sink.logits), sink.spread)
        if math.prod(sink.spread) < heads:
            logits = emit(op.broadcast_to(logits, sink.full))
        return reshaped(emit, logits, (heads,))

    def _sum(self, a, b):
        if a is None:
            return b
        if dtype_of(a) != dtype_of(b):
            a, b = (_cast(self.builder_.emit, x, "float32") for x in (a, b))
        return self.builder_.emit(op.add(a, b))

    def _broadcastable(self, operand, level, batch_and_heads):
        """`operand`, which broadcasts to scores of shape `level`, in a shape that broadcasts to (B, H, Sq, Skv).

        The leading dimensions that make up the batch become one; it has length 1 if all of them have.  The same holds
        for those that make up the heads.
        """
        emit = self.builder_.emit
        shape = shape_of(operand)
        shape = (1,) * (len(level) - len(shape)) + shape
        lead, rows_and_columns = level[:-2], shape[-2:]
        if math.prod(shape[:-2]) == 1:
            return reshaped(emit, operand, (1, 1, *rows_and_columns))
        batch, _ = batch_and_heads
        cut = next((i for i in range(len(lead) + 1) if math.prod(lead[:i]) == batch), None)
        if cut is None:  # one dimension holds batch and heads
            groups = [(lead, shape[:-2])]
        else:
            groups = [(lead[:cut], shape[:cut]), (lead[cut:], shape[cut:-2])]
        grown = [n for full, given in groups for n in (given if math.prod(given) == 1 else full)]
        sizes = [1 if math.prod(given) == 1 else math.prod(full) for full, given in groups]
        if tuple(grown) != shape[:-2]:
            operand = emit(op.broadcast_to(operand, (*grown, *rows_and_columns)))
        return reshaped(emit, operand, (*(batch_and_heads if cut is None else sizes), *rows_and_columns))


def _cast(emit, expr, dtype):
    return expr if dtype_of(expr) == dtype else emit(op.astype(expr, dtype))
