"""Weights of pairs that are combined with values in ways no matcher knows: attention that a mask must not miss.

Scores of pairs compare each token of one set with each token of another, both known at run time only: by a product, an
einsum or broadcasting.  They remain scores of pairs if heads are mixed.  The result of a softmax, an exponential or a
choice (argmax, topk) on such scores is weights.  The result of another nonlinear function is weights if it meets
tensors of other shapes.  Anything else computed from the inputs that the weights then meet counts as values: in a
product from the right, a product and a sum, an einsum of three operands, in parts, or in a gather.

Scores from which only the model's result is computed, such as similarities that it returns, give no weights.  Neither
do scores that a model's parameters compute from tokens, as in routers, pooling by a learned query and synthesizers.
"""

from tvm import relax

from relax_passes.attention.refusals.other_attention import NONLINEAR, compares_pairs
from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.length_origins import FEATURES, LengthOrigins

STRAY_WEIGHTS = "its weights meet the values in another way than by a product weights · values"
STRAY_CHOICE = "{} chooses among the values by q·kᵀ, which is no softmax"
STRAY_OTHERS = "{} turns q·kᵀ into weights that meet the values in another way than by a product"
SOFTMAXES = ("nn.softmax", "nn.log_softmax", "exp")  # an exponential may be divided late, or never
CHOICES = ("argmax", "topk", "argsort", "sort")
CONTRACTIONS = ("matmul", "einsum")


def stray_weights(bindings: Bindings, var: relax.Var, origins: LengthOrigins, results: set) -> str | None:
    """The reason to report for the softmax, choice or other nonlinear operator bound to `var`; None if there is none.

    Callers leave out operators that a matcher took or refused.  `results` are the variables of the products that end
    matched attentions; these products are no scores.
    """
    call, name = bindings.value(var), operator(bindings.value(var))
    if name not in (*SOFTMAXES, *CHOICES, *NONLINEAR):
        return None
    scores, is_softmax = call.args[0], name not in NONLINEAR or name in SOFTMAXES
    if is_softmax and _is_over_features(call, scores, origins):
        return None
    if not (is_softmax and compares_pairs(bindings, scores, origins.is_closed)):
        if not _contraction_before(bindings, scores, origins, results):
            return None
    if not _meets_values(bindings, var, scores, origins, is_softmax):
        return None
    return STRAY_WEIGHTS if name in SOFTMAXES else (STRAY_CHOICE if is_softmax else STRAY_OTHERS).format(call.op.name)


def _is_over_features(call, scores, origins) -> bool:
    """Whether the softmax or choice is over features that a weight of the model made, such as classes and experts."""
    axis = getattr(call.attrs, "axis", None)
    if axis is None or static_shape(scores) is None or not shape_of(scores):
        return False
    return origins.of(scores, int(axis)) == FEATURES


def _contraction_before(bindings, scores, origins, results) -> bool:
    """Whether `scores` come from a product or an einsum of pairs, without another contraction of run-time operands."""
    pending, seen = [scores], set(results)
    while pending:
        expr = pending.pop()
        call = bindings.value(expr)
        if operator(call) in CONTRACTIONS:
            if _pairs_tokens(bindings, expr, call, origins):
                return True
            if sum(not origins.is_closed(x) for x in bindings.operands(call)) > 1:
                continue
        for inner in relax.analysis.free_vars(call) if isinstance(call, relax.Call | relax.TupleGetItem) else ():
            if inner not in seen and not origins.is_closed(inner):
                seen.add(inner)
                pending.append(inner)
    return False


def _pairs_tokens(bindings, expr, call, origins) -> bool:
    """Whether a contraction of two run-time operands has rows of one and columns of the other, neither features."""
    if operator(call) == "matmul":
        ranks = {len(x.ty.shape) for x in call.args}  # of different ranks, it is a projection by a weight
        if static_shape(call) is None or len(ranks) > 1 or ranks == {1}:
            return False
        is_open = not any(origins.is_closed(x) for x in call.args)
        return is_open and FEATURES not in (origins.of(expr, -2), origins.of(expr, -1))
    operands = bindings.operands(call)
    inputs, _, output = str(call.attrs.subscripts).replace(" ", "").partition("->")
    free = []  # of each run-time operand, the dimensions that it gives to the result and that are no features
    for x, labels in zip(operands, inputs.split(",")):
        if not origins.is_closed(x) and "." not in labels and static_shape(x) is not None:
            free.append({label for i, label in enumerate(labels) if origins.of(x, i) != FEATURES} & {*output})
    return any(a - b and b - a for i, a in enumerate(free) for b in free[:i])


def _meets_values(bindings, weights, scores, origins, is_softmax: bool) -> bool:
    """Whether something computed from `weights` meets run-time values that are not computed from `scores`.

    Unless `is_softmax`, only a contraction, a gather, or a product of two shapes counts.
    """
    pending, seen, source = [weights], {weights}, bindings.value(scores)
    while pending:
        var = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            if reader in seen:
                continue
            name = operator(call)
            if not name and isinstance(call, relax.Call):  # an attention that has them as an operand
                return True
            others = [x for x in relax.analysis.free_vars(call) if not origins.is_closed(x)]
            others = [x for x in others if not bindings.depends_on(x, source)]
            if name and others and (is_softmax or _combines(call, name, var)):
                return True
            if not is_softmax and (others or name in CONTRACTIONS):
                continue
            seen.add(reader)
            pending.append(reader)
    return False


def _combines(call, name: str, var) -> bool:
    if name in (*CONTRACTIONS, "take", "gather_elements", "gather_nd"):
        return True
    shapes = [shape for x in call.args if isinstance(x, relax.Var) and (shape := static_shape(x)) is not None]
    return name == "multiply" and len({*shapes}) == 2
