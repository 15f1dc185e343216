"""The one form of every attention, however a model writes it: a private function, `Composite = "stof.attention"`.

    o = attention_7(q, k, v[, mask][, bias][, sink][, positions])

    q (B, H, Sq, D), k (B, Hkv, Skv, D), v (B, Hkv, Skv, Dv), mask bool and bias float, both four-dimensional and
    broadcast to (B, H, Sq, Skv), sink float (H,), positions int64 (Sq,), o (B, H, Sq, Dv) in q's dtype

A sink is a logit of each query head that is added to the softmax's denominator only, like one more key whose value is
0.  It is neither scaled nor biased nor masked.

A mask that the user gives has a row for each query, counted from 0.  In an attention over a cache, or of some queries
only (`ComputeReadRows`), it is a mask of (Skv, Skv) elements instead: queries have its rows from `stof.first_row` (int)
on, or the rows `positions`, where a negative one counts from the end and one outside makes the row NaN.  The model's
own mask has Sq rows all the same.

The function's attributes have the rest: `stof.scale` (float), `stof.softcap` (float, only if scaled scores s become
softcap * tanh(s / softcap) before bias and mask), `stof.causal` ("", "top-left" or "bottom-right"), `stof.operands`
(which of mask, bias, sink and positions are given, in order), `stof.site` (the module path in the PyTorch model) and
`stof.spelling` (how the model wrote it).  `stof.empty_rows` says what the model gives in PyTorch for a row in which its
own mask and bias leave only -inf: "zero" for scaled_dot_product_attention, "nan" for a softmax written by hand.  After
`FoldMasks` it is "zero" everywhere, because kernels give 0, and a `where` after the call gives the NaNs.  The
function's body is a dense computation of the same result.  So a call that no pass rewrites is inlined and still right.

`stof.first_head` and `stof.all_heads` (int) are there where the call has only some of the heads of the model's
attention, from that one on: a mask that the user gives has a pattern for each of all heads.

`stof.reordered` is there where `OrderTokens` has put the tokens in the order that the user's mask wants.

The scale is positive and finite.  `emit_attention` moves a scale of 0 or less, or a tiny one, into q.
"""

import math
from dataclasses import dataclass

from tvm import relax, tirx
from tvm.ir import GlobalVar

from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import shape_of
from relax_passes.ir.open_blocks import closing_blocks
from tir_kernels.errors import UnsupportedError

COMPOSITE = "stof.attention"
NOTES = "stof.notes"  # module attribute: a list of [site, note to the user], from all passes
REORDERED = "stof.reordered"
LEAST_SCALE = 1e-30  # kernels divide by the scale


@dataclass(frozen=True)
class AttentionCall:
    """A call of the composite, taken apart.

    `function` is the private function; the other fields are the call's operands and the function's attributes.
    """

    function: relax.Function
    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    mask: relax.Expr | None
    bias: relax.Expr | None
    sink: relax.Expr | None
    positions: relax.Expr | None
    scale: float
    softcap: float | None
    causal: str
    first_row: int | None
    empty_rows: str
    site: str
    spelling: str
    heads: tuple[int, int] | None = None
    reordered: bool = False

    @property
    def mask_sizes(self) -> tuple[int, int, int, int]:
        """(B, H, Sq, Skv) of the user's mask, or with positions (B, H, Skv, Skv)."""
        (batch, heads, q_len, _), kv_len = shape_of(self.q), shape_of(self.k)[2]
        return batch, heads, q_len if self.positions is None else kv_len, kv_len


def emit_attention(
    builder,
    q,
    k,
    v,
    *,
    mask=None,
    bias=None,
    sink=None,
    positions=None,
    scale=None,
    softcap=None,
    causal="",
    first_row=None,
    empty_rows="zero",
    site="",
    spelling="",
    heads=None,
) -> relax.Var:
    """Add the composite function for these operands to the builder's module and emit a call of it.

    `scale` None means 1/sqrt(D), as in PyTorch.  Operands must have known rank 4 and dtype; lengths may be symbolic.
    Raises UnsupportedError for a scale that is not finite.
    """
    if scale is None:
        scale = 1.0 / math.sqrt(int(q.ty.shape[3]))
    if not math.isfinite(scale):
        raise UnsupportedError(f"attention {named(site)} has the scale {scale}; it must be finite")
    if scale < LEAST_SCALE:  # q takes the factor; if it is 0, infinite elements of q become NaN
        factor, scale = (-1.0, -scale) if scale < -LEAST_SCALE else (scale, 1.0)
        q = builder.emit(relax.op.multiply(q, relax.const(factor, str(q.ty.dtype))))
    optional = {"mask": mask, "bias": bias, "sink": sink, "positions": positions}
    optional = {name: operand for name, operand in optional.items() if operand is not None}
    params = {"q": q, "k": k, "v": v, **optional}
    params = {name: relax.Var(name, operand.ty) for name, operand in params.items()}
    # Symbolic lengths must not be shared between functions.
    function = relax.utils.copy_with_new_vars(_dense_function(params, float(scale), softcap, causal, empty_rows))
    attrs = {
        "Composite": COMPOSITE,
        "stof.scale": tirx.FloatImm("float64", float(scale)),
        "stof.causal": causal,
        "stof.operands": list(optional),
        "stof.empty_rows": empty_rows,
        "stof.site": site,
        "stof.spelling": spelling,
    }
    if softcap is not None:
        attrs["stof.softcap"] = tirx.FloatImm("float64", float(softcap))
    if first_row is not None:
        attrs["stof.first_row"] = first_row
    if heads is not None:
        attrs["stof.first_head"], attrs["stof.all_heads"] = heads
    function = function.with_attrs(attrs)
    name = "attention" if not site else "attention_" + "".join(c if c.isalnum() else "_" for c in site)
    return builder.emit(relax.Call(builder.add_func(function, name), [q, k, v, *optional.values()]))


def match_attention(mod, expr) -> AttentionCall | None:
    """The parts of `expr` if it is a call of the composite in `mod`, else None."""
    if not isinstance(expr, relax.Call) or not isinstance(expr.op, GlobalVar):
        return None
    function = mod[expr.op]
    if not is_attention(function):
        return None
    q, k, v, *rest = expr.args
    operands = dict(zip((str(name) for name in function.attrs["stof.operands"]), rest))
    return AttentionCall(
        function,
        q,
        k,
        v,
        operands.get("mask"),
        operands.get("bias"),
        operands.get("sink"),
        operands.get("positions"),
        float(function.attrs["stof.scale"].value),
        float(function.attrs["stof.softcap"].value) if "stof.softcap" in function.attrs else None,
        str(function.attrs["stof.causal"]),
        int(function.attrs["stof.first_row"]) if "stof.first_row" in function.attrs else None,
        str(function.attrs["stof.empty_rows"]),
        str(function.attrs["stof.site"]),
        str(function.attrs["stof.spelling"]),
        (int(function.attrs["stof.first_head"]), int(function.attrs["stof.all_heads"]))
        if "stof.first_head" in function.attrs
        else None,
        REORDERED in function.attrs,
    )


def is_attention(function) -> bool:
    """Whether a function of a module is the composite."""
    attrs = getattr(function, "attrs", None)
    return attrs is not None and "Composite" in attrs and str(attrs["Composite"]) == COMPOSITE


def _dense_function(params: dict, scale: float, softcap: float | None, causal: str, empty_rows: str) -> relax.Function:
    """A function that computes softmax(scale * q kᵀ + bias | mask) v in float32, with a softcap after the scale.

    A row in which nothing is kept gives 0 or NaN, as `empty_rows` says.  A sink only adds its exponential to the sum of
    each row's exponentials.
    """
    op = relax.op
    builder = relax.BlockBuilder()
    q, k, v = (params[name] for name in ("q", "k", "v"))
    with closing_blocks(builder), builder.function("attention", list(params.values())):
        with builder.dataflow():
            emit = builder.emit
            q32, k32, v32 = (emit(op.astype(x, "float32")) for x in (q, k, v))
            group = int(q.ty.shape[1]) // int(k.ty.shape[1])
            if group > 1:
                k32, v32 = (emit(op.repeat(x, group, axis=1)) for x in (k32, v32))
            scores = emit(op.matmul(q32, emit(op.permute_dims(k32, [0, 1, 3, 2]))))
            factor = scale if softcap is None else scale / softcap
            scores = emit(op.multiply(scores, relax.const(factor, "float32")))
            if softcap is not None:
                scores = emit(op.multiply(emit(op.tanh(scores)), relax.const(softcap, "float32")))
            if "bias" in params:
                scores = emit(op.add(scores, emit(op.astype(params["bias"], "float32"))))
            minus_inf = relax.const(-math.inf, "float32")
            if "mask" in params:
                scores = emit(op.where(params["mask"], scores, minus_inf))
            if causal:
                scores = emit(op.where(causal_keep(emit, q.ty.shape[2], k.ty.shape[2], causal), scores, minus_inf))
            row_max = emit(op.max(scores, axis=-1, keepdims=True))
            if "sink" in params and empty_rows == "nan":
                # The largest score does not tell empty rows: TVM's maximum of nothing but -inf is finfo.min.
                kept = emit(op.astype(emit(op.not_equal(scores, minus_inf)), "int32"))
                is_empty = emit(op.equal(emit(op.max(kept, axis=-1, keepdims=True)), relax.const(0, "int32")))
            if "sink" in params:
                sink = emit(op.reshape(op.astype(params["sink"], "float32"), (1, int(q.ty.shape[1]), 1, 1)))
                row_max = emit(op.maximum(row_max, sink))
            row_max = emit(op.where(emit(op.equal(row_max, minus_inf)), relax.const(0.0, "float32"), row_max))
            weights = emit(op.exp(emit(op.subtract(scores, row_max))))
            total = emit(op.sum(weights, axis=-1, keepdims=True))
            if "sink" in params:
                total = emit(op.add(total, emit(op.exp(emit(op.subtract(sink, row_max))))))
            if empty_rows == "zero":
                is_empty = emit(op.equal(total, relax.const(0.0, "float32")))
                total = emit(op.where(is_empty, relax.const(1.0, "float32"), total))
            if "sink" in params and empty_rows == "nan":
                total = emit(op.where(is_empty, relax.const(math.nan, "float32"), total))
            out = emit(op.matmul(emit(op.divide(weights, total)), v32))
            out = builder.emit_output(op.astype(out, q.ty.dtype))
        builder.emit_func_output(out)
    return builder.finalize()["attention"].without_attr("global_symbol")


def causal_keep(emit, q_len, kv_len, align: str) -> relax.Expr:
    """Bool (Sq, Skv): column <= row, counted from the top-left or from the bottom-right corner; emits its operators."""
    op = relax.op
    rows = emit(op.expand_dims(emit(op.arange(0, q_len, 1, "int64")), 1))
    columns = emit(op.expand_dims(emit(op.arange(0, kv_len, 1, "int64")), 0))
    if align == "bottom-right":
        rows = emit(op.add(rows, relax.const(int(kv_len) - int(q_len), "int64")))
    return emit(op.less_equal(columns, rows))
