"""Canonicalize attention: softmax(q kᵀ · s + M) v spelled by hand becomes the composite, and repeated heads are undone.

Preconditions: parameters are bound as constants; before `FoldMasks` and `LegalizeOps`.  Softmax is `relax.nn.softmax`
whose span names the module path.  A softmax between two products that the composite cannot express stays as it is and
is recorded with the reason in the module attribute `stof.not_rewritten`, a list of [site, reason].

A fill value of at most -1e4 that is finite is kept exactly where it matters: scores become scores + finfo.min, which
rounds to finfo.min, so a row of nothing but masked scores still averages as in PyTorch.
"""

import math

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention_composite import emit_attention, is_attention, match_attention
from relax_passes.attention_patterns import AttentionMatch, NotAttention, match_softmax, site_of
from relax_passes.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.repeated_heads import KeysOrValues, emit_keys_and_values, reshaped, unrepeated

NOT_REWRITTEN = "stof.not_rewritten"
FLOAT32_MIN = -3.4028234663852886e38

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
        self.bindings: Bindings  # of the present function
        self.matches = {}  # variable bound to the product with v -> AttentionMatch
        self.refused = []

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self.bindings = Bindings(function)
            self._match()
            self.builder_.update_func(global_var, self.visit_expr(function))
        mod = self.builder_.get().with_attr(NOT_REWRITTEN, self.refused)
        return relax.transform.DeadCodeElimination()(mod)

    def _match(self):
        for var, value in self.bindings.values.items():
            if operator(value) != "nn.softmax":
                continue
            try:
                match = match_softmax(self.bindings, var)
            except NotAttention as refusal:
                self.refused.append([site_of(value), str(refusal)])
                continue
            if match is not None:
                self.matches[match.out] = match

    def visit_var_binding_(self, binding):
        new = None
        if binding.var in self.matches:
            new = self._emit_match(self.matches[binding.var], binding.value)
        elif (call := match_attention(self.mod, binding.value)) is not None:
            new = self._with_kv_heads(call)
        if new is None:
            super().visit_var_binding_(binding)
        else:
            if not isinstance(binding.var, relax.DataflowVar):
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
        mask, bias = (None if x is None else self.visit_expr(x) for x in (call.mask, call.bias))
        return emit_attention(
            self.builder_,
            self.visit_expr(call.q),
            *kv,
            mask=mask,
            bias=bias,
            scale=call.scale,
            causal=call.causal,
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
            axes = [*range(len(lead)), len(lead) + 1, len(lead)]
            plain_k = emit(op.permute_dims(self.visit_expr(match.k), axes))
            k = KeysOrValues(plain_k, False, math.prod(shape_of(match.k)) // (batch * kv_len * dim), 1)
        else:
            plain_k = match.k
            k = unrepeated(self.bindings, match.k, batch, kv_len, dim)
        k, v = emit_keys_and_values(emit, self.visit_expr, k, v, plain_k, match.v, batch, kv_len, (dim, v_dim))
        if len({dtype_of(x) for x in (q, k, v)}) > 1:
            q, k, v = (_cast(emit, x, "float32") for x in (q, k, v))
        scale, mask, bias = self._scale_mask_bias(match, (batch, heads))
        out = emit_attention(
            self.builder_, q, k, v, mask=mask, bias=bias, scale=scale, site=match.site, spelling=match.spelling
        )
        return _cast(emit, reshaped(emit, out, static_shape(product)), dtype_of(product))

    def _scale_mask_bias(self, match, batch_and_heads):
        """Run the steps on the composite's normal form: scale * q·kᵀ + bias, and -inf where the mask is false."""
        emit = self.builder_.emit
        scale, mask, bias = match.scale, None, None
        for step in match.steps:
            if step.kind == "scale":
                scale *= step.number
                bias = None if bias is None else emit(op.multiply(bias, relax.const(step.number, dtype_of(bias))))
            elif step.kind == "floor":
                bias = self._floored(mask, bias)
                mask = None
            else:
                operand = self._broadcastable(self.visit_expr(step.operand), step.shape, batch_and_heads)
                if step.negate:
                    operand = emit((op.negative if step.kind == "add" else op.logical_not)(operand))
                if step.kind == "add":
                    bias = self._sum(bias, operand)
                elif step.number == -math.inf:
                    mask = operand if mask is None else emit(op.logical_and(mask, operand))
                else:
                    bias = self._filled(operand, bias)
        return scale, mask, bias

    def _floored(self, mask, bias):
        """The bias after scores were raised to at least a fill value: what was -inf is a finite fill from here on."""
        if bias is not None:
            bias = self.builder_.emit(op.maximum(_cast(self.builder_.emit, bias, "float32"), _minimum()))
        return bias if mask is None else self._filled(mask, bias)

    def _filled(self, keep, bias):
        bias = relax.const(0.0, "float32") if bias is None else _cast(self.builder_.emit, bias, "float32")
        return self.builder_.emit(op.where(keep, bias, _minimum()))

    def _sum(self, a, b):
        if a is None:
            return b
        if dtype_of(a) != dtype_of(b):
            a, b = (_cast(self.builder_.emit, x, "float32") for x in (a, b))
        return self.builder_.emit(op.add(a, b))

    def _broadcastable(self, operand, level, batch_and_heads):
        """An operand that broadcasts to scores of shape `level`, as one that broadcasts to (B, H, Sq, Skv).

        Leading dimensions that make up the batch, or the heads, stay 1 if all of them are 1.
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


def _minimum():
    return relax.const(FLOAT32_MIN, "float32")


def _cast(emit, expr, dtype):
    return expr if dtype_of(expr) == dtype else emit(op.astype(expr, dtype))
