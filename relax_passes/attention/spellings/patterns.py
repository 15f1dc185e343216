"""Attention written by hand: the operators around a softmax, from q·kᵀ before it to the product with v after it.

    softmax(floor(where(keep, scale * (q kᵀ) + bias, fill))) v       steps in any order and number, reshapes between

Scores may be capped by a tanh before they are biased or filled.

The match is read-only and names what it found in the function's own variables; `CanonicalizeAttention` emits it.
spellings/softmax.py has the spellings of the softmax, spellings/steps.py the operators that may stand before it, and
spellings/normal_form.py their meaning.
"""

import functools
import math
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import relax

from relax_passes.attention.refusals.other_attention import compares_pairs, leads_to_product
from relax_passes.attention.sinks.gates import find_gate
from relax_passes.attention.sinks.logits import Sink
from relax_passes.attention.sinks.patterns import joined_scores, without_column
from relax_passes.attention.spellings.normal_form import Fill, NormalForm, normal_form
from relax_passes.attention.spellings.row_maxima import is_row_maximum
from relax_passes.attention.spellings.softmax import Softmax
from relax_passes.attention.spellings.steps import NotAttention, ScoresTrace, Step, comes_from_product, factor
from relax_passes.attention.spellings.weights import check_precision, follow_weights, masked_once
from relax_passes.ir.bindings import Bindings, dtype_of, operator, permutation, shape_of, static_shape, strip_reshapes
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.floats import keeps_precision
from relax_passes.ir.length_origins import FEATURES, LengthOrigins
from relax_passes.ir.magnitudes import Magnitudes
from relax_passes.legalizations.closed_values import closed_values
from tir_kernels.attention.problem import DTYPES

LARGEST_LOGIT = 80.0  # the exponential of a sink's logit of this size is a normal float32
LARGEST_SUMMAND = 1e5  # a float32 of this size still holds the logarithm of a sum that is added to it, to 0.004


@dataclass
class AttentionMatch:
    """One attention: operands as variables of the function, of any rank, and the normal form of its scores.

    k is (…, D, Skv) if `k_is_transposed`, else (…, Skv, D).  `out` is the last variable of the attention.  It is bound
    to the product with v, to that product divided by the softmax's sum, or to one of these times a sink's gate.
    `batch_and_heads` is (B, H) if some shape along the way tells them apart, else None.  `sink` is the logit of each
    head in the denominator, or None.  `scores` is the product of q and k.
    """

    site: str
    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    k_is_transposed: bool
    form: NormalForm
    scores_shape: tuple[int, ...]
    out: relax.Var
    batch_and_heads: tuple[int, int] | None
    empty_rows: str
    sink: Sink | None = None
    scores: relax.Call = field(kw_only=True)
    spelling: str = field(init=False)

    def __post_init__(self):
        names = {"tanh": "tanh", "add": "add", "fill": "where", "floor": "maximum"}
        steps = [x.step if isinstance(x, Fill) else x for x in self.form.steps]
        kinds = [names[step.kind] for step in steps if step.kind in names]
        self.spelling = f"softmax({'+'.join(dict.fromkeys(kinds)) or 'matmul'})"


class Known:
    """Facts about a function's expressions at compile time: bounds of magnitudes, and values of constants."""

    def __init__(self, bindings: Bindings):
        self.bindings = bindings
        self.magnitudes = Magnitudes(bindings)

    @functools.cached_property
    def closed(self) -> ClosedExpressions:
        """The closed expressions: those that contain nothing given at run time."""
        return ClosedExpressions(self.bindings)

    def is_closed(self, expr) -> bool:
        """Whether nothing that is given at run time is in `expr`."""
        return self.closed.is_closed(expr)

    def values(self, exprs) -> list[np.ndarray]:
        """The values of closed expressions, each in its own (shape, dtype), but float32 for bfloat16."""
        return closed_values(self.bindings, exprs)

    @functools.cached_property
    def origins(self) -> LengthOrigins:
        """Where lengths come from; parameters that stand for constants make features, as constants do."""
        weights = self.bindings.weights
        is_closed = ClosedExpressions(self.bindings, weights).is_closed if weights else self.is_closed
        return LengthOrigins(self.bindings, is_closed)

    def puts_heads_first(self, q) -> bool:
        """Whether `q` has heads before the batch: a weight made the first of its four dimensions and not the second."""
        if static_shape(q) is None or len(shape_of(q)) != 4:
            return False
        return self.origins.of(q, 0) == FEATURES != self.origins.of(q, 1)

    def bound(self, expr) -> float:
        """The largest finite absolute value in `expr`; inf where nothing is known, or where a NaN or +inf is in it."""
        bound = self.magnitudes.of(expr)
        if math.isfinite(bound):
            return bound
        if not self.is_closed(expr):
            return bound
        (values,) = self.values([expr])
        if np.isnan(values).any() or np.isposinf(values).any():
            return math.inf
        return float(np.abs(values[np.isfinite(values)]).max(initial=0.0))

    def largest(self, step: Step) -> float:
        """The largest number that a step adds to scores; inf where nothing is known."""
        largest = self.magnitudes.largest(step.operand, step.negate)
        if not self.is_closed(step.operand) or largest <= 0:
            return largest
        (values,) = self.values([step.operand])
        return math.inf if np.isnan(values).any() else float((-values if step.negate else values).max(initial=0.0))


def match_softmax(bindings: Bindings, softmax: Softmax, known: Known) -> AttentionMatch | None:
    """The attention around a softmax; None unless there is a product before it and one after it.

    Raises NotAttention with the reason if there are both, but the composite cannot express what lies between.
    """
    softmax = without_column(bindings, softmax)
    joined = joined_scores(bindings, softmax, softmax.scores)
    if not joined and not leads_to_product(bindings, softmax.weights):
        return None
    if not comes_from_product(bindings, softmax.scores):
        if any(compares_pairs(bindings, scores, known.is_closed) for scores in (softmax.scores, *joined)):
            raise NotAttention("its scores compare queries and keys otherwise than by a product")
        return None
    if static_shape(softmax.call) is None:
        raise NotAttention(f"its scores have the symbolic shape {list(softmax.call.ty.shape)}")
    rank = len(softmax.call.ty.shape)
    if operator(softmax.call) in ("nn.softmax", "nn.log_softmax") and softmax.call.attrs.axis not in (-1, rank - 1):
        raise NotAttention(f"its softmax is over dimension {softmax.call.attrs.axis}, not over the keys")
    softmax = _with_gated_weights(bindings, softmax)
    way = follow_weights(bindings, softmax, known)
    weights, product = way.met, way.product
    if softmax.divided is not None:
        _check_divided(bindings, product, softmax.divided)
    chain = ScoresTrace(bindings, lambda shift, scores: is_row_maximum(bindings, shift, scores))
    scores, steps = chain.trace(softmax.scores)
    if any(step.kind == "factor" and bindings.depends_on(step.operand, scores) for step in steps):
        raise NotAttention("its scores are multiplied by what is computed from them")
    if any(step.kind == "factor" and _is_infinite_factor(step, known) for step in steps):
        raise NotAttention("its scores are multiplied by infinite numbers, or divided by 0")
    if any(step.kind == "add" and bindings.depends_on(step.operand, scores) for step in steps):
        # Kernels round scores elsewhere than the model: scores and a summand that cancel there would not cancel here.
        raise NotAttention("what is added to its scores is computed from them")
    out, sink = _with_gated_output(bindings, softmax, product if softmax.divided is None else softmax.divided)
    if sink is not None and any(step.kind == "shift" for step in steps):
        raise NotAttention("its scores are taken relative to their rows' maxima, and its sink is not")
    _check_shared("keys", shape_of(scores.args[1]), shape_of(scores)[:-2])
    _check_shared("values", shape_of(bindings.value(product).args[1]), shape_of(weights)[:-2])
    q, q_scale = _strip_scales(bindings, scores.args[0])
    k, k_scale, k_is_transposed = _strip_transpose(bindings, scores.args[1])
    v = strip_reshapes(bindings, bindings.value(product).args[1])
    q, k, v = _strip_upcasts(bindings, q, k, v)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if dtype_of(x) not in DTYPES:
            raise NotAttention(f"{name} is {dtype_of(x)}")
    source_dtype = dtype_of(q) if keeps_precision(dtype_of(k), dtype_of(q)) else dtype_of(k)
    check_precision(way, source_dtype)
    form_of = functools.partial(
        normal_form,
        scale=q_scale * k_scale,
        source_dtype=source_dtype,
        score_bound=_bound_of_scores(known, q, k, steps),
        bound_of=known.bound,
        largest_of=known.largest,
    )
    form = form_of(steps)
    if softmax.vanishes and not form.masks_by_infinity_only and not _never_vanishes(softmax, known):
        raise NotAttention("its exponentials may all vanish: no maximum is taken off scores that are biased or filled")
    if softmax.subtracts_log_sum and sink is None and not _keeps_log_sums(form, known):
        raise NotAttention(
            "its rows' log-sum-exp is taken off scores that may be huge, as finite fills are: exp(s - logsumexp(s)) of "
            "equal fills is 1, not their share; fill with -inf, or use softmax"
        )
    steps, empty_rows = masked_once(bindings, way, steps, softmax.empty_rows, known)
    if way.kept:
        form = replace(form_of(steps), notes=form.notes)
    shapes = [shape_of(scores), *chain.shapes, shape_of(weights), shape_of(q)]
    batch_and_heads = next(((shape[0], shape[1]) for shape in shapes if len(shape) == 4), None)
    if batch_and_heads is not None and batch_and_heads[0] == batch_and_heads[1] > 1:
        if any(map(known.puts_heads_first, (scores.args[0], q))):
            raise NotAttention(f"its heads come before its batch, and there are {batch_and_heads[0]} of both")
    if sink is not None and sink.is_of_heads:
        heads = math.prod(shape_of(scores)[1:-2]) if batch_and_heads is None else batch_and_heads[1]
        if math.prod(sink.full) != heads:
            raise NotAttention(f"its sink is of {math.prod(sink.full)} heads, and it has {heads}")
    return AttentionMatch(
        site_of(softmax.call),
        q,
        k,
        v,
        k_is_transposed,
        form,
        shape_of(scores),
        out,
        batch_and_heads,
        empty_rows,
        sink,
        scores=scores,
    )


def _with_gated_weights(bindings, softmax: Softmax) -> Softmax:
    """The softmax with the sink of a gate that multiplies its weights, if there is one."""
    found = None if softmax.divided is not None else find_gate(bindings, softmax.weights, softmax.scores)
    if found is None or softmax.sink is not None:
        return softmax
    return replace(softmax, weights=found[0], sink=found[1])


def _with_gated_output(bindings, softmax: Softmax, out) -> tuple[relax.Var, Sink | None]:
    """(the attention's last variable, its sink), with a gate after the product with v taken into account."""
    found = find_gate(bindings, out, softmax.scores)
    if found is None:
        return out, softmax.sink
    if softmax.sink is not None:
        raise NotAttention("its result meets something else that its scores give")
    return found


def _is_infinite_factor(step: Step, known) -> bool:
    """Whether a constant has numbers that make a row of q or k infinite, and its products NaN where scores are not."""
    if not known.is_closed(step.operand):
        return False
    numbers = known.values([step.operand])[0]
    return not np.isfinite(numbers).all() or (step.negate and not numbers.all())


def _bound_of_scores(known, q, k, steps) -> float:
    """The bound of scores times tensors of factors."""
    bound = known.magnitudes.of_scores(q, k)
    for step in steps:
        if step.kind == "factor":
            factors = math.inf if step.negate else known.bound(step.operand)
            bound = 0.0 if 0 in (bound, factors) else bound * factors
    return bound


def _never_vanishes(softmax: Softmax, known) -> bool:
    """Whether a sink keeps the sum of exponentials above 0 where those of all scores are 0."""
    if softmax.sink is None:
        return False
    logits = softmax.sink.logits
    return softmax.raised + (abs(logits) if isinstance(logits, float) else known.bound(logits)) <= LARGEST_LOGIT


def _keeps_log_sums(form: NormalForm, known) -> bool:
    """Whether each row's largest score comes from the product q·kᵀ or is -inf, not from a fill or a huge summand."""
    if any(step.kind == "floor" for step in form.steps):
        return False
    huge = [x for x in form.steps if x.kind == "add" and known.bound(x.operand) > LARGEST_SUMMAND]
    fills = [x.step for x in form.operations if isinstance(x, Fill)]
    if not huge and all(x.value == -math.inf for x in form.operations if isinstance(x, Fill)):
        return True
    if not all(known.is_closed(step.operand) for step in (*huge, *fills)):
        return False
    kept = [np.asarray(x) != step.negate for x, step in zip(known.values([x.operand for x in fills]), fills)]
    for x, step in zip(known.values([x.operand for x in huge]), huge):
        summand = -x if step.negate else x
        if (summand > LARGEST_SUMMAND).any():
            return False
        kept.append(summand >= -LARGEST_SUMMAND)
    return bool(functools.reduce(np.logical_and, kept).any(-1).all())


def site_of(softmax: relax.Call) -> str:
    """The module path in the softmax's span; "" for a span with a line, which is a place in a script."""
    return softmax.span.source_name.name if softmax.span is not None and softmax.span.line == 0 else ""


def _check_shared(name, shape, lead):
    """NotAttention unless keys or values have the scores' leading dimensions `lead`.

    The last of these may be 1 instead: a group shares the heads.
    """
    given = shape[:-2]
    shared = [n for n, full in zip(given, lead) if n != full]
    if len(given) != len(lead) or any(n != 1 for n in shared):
        raise NotAttention(f"{name} of shape {shape} do not meet scores with the leading dimensions {lead}")
    if shared and (given[0] != lead[0] or given[len(given) - len(shared) :] != (1,) * len(shared)):
        raise NotAttention(f"{name} of shape {shape} are shared by all batches")


def _check_divided(bindings, product, division):
    """NotAttention unless `division` divides the product itself, keeps its shape, and alone reads it."""
    call = bindings.value(division)
    readers, is_output = bindings.readers[product], product in bindings.outputs
    if not bindings.value(call.args[0]).same_as(bindings.value(product)) or len(readers) != 1 or is_output:
        raise NotAttention("the product of its exponentials with the values is read before it is divided by their sum")
    if static_shape(call) != static_shape(bindings.value(product)):
        raise NotAttention("the product with the values is divided by a sum of another shape")


def _strip_scales(bindings, expr):
    """`expr` before multiplications by numbers and reshapes of its leading dimensions, and the numbers' product."""
    scale = 1.0
    while True:
        expr = strip_reshapes(bindings, expr)
        call = bindings.call(expr, "multiply", "divide")
        if call is None:
            return expr, scale
        number, inner = factor(bindings, call)
        if number is None or static_shape(inner) != static_shape(call):
            return expr, scale
        scale, expr = scale * number, inner


def _strip_transpose(bindings, expr):
    """The same for kᵀ, also before a transpose of the last two dimensions: (k, scale, whether k is transposed)."""
    expr, scale = _strip_scales(bindings, expr)
    call = bindings.call(expr, "permute_dims")
    if call is None:
        return expr, scale, True
    axes = permutation(call)
    if axes != [*range(len(axes) - 2), len(axes) - 1, len(axes) - 2]:
        return expr, scale, True
    expr, k_scale = _strip_scales(bindings, call.args[0])
    return expr, scale * k_scale, False


def _strip_upcasts(bindings, q, k, v):
    """(q, k, v), q and k before casts to float32 that only the scores need: kernels accumulate in float32 anyway."""

    def narrow(x):
        call = bindings.call(x, "astype")
        return call.args[0] if call is not None and dtype_of(call.args[0]) == dtype_of(v) else x

    return (q, k, v) if dtype_of(q) == dtype_of(v) else (narrow(q), narrow(k), v)
