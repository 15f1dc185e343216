"""Weights of pairs that meet the values where no matcher looks: attention that a given mask must not pass by.

Scores are of pairs if every one of some tokens is compared with every one of others, both known at run time only: by
a product, by an einsum, or by broadcasting.  Weights are what a softmax, a choice (argmax, topk) or, followed by a sum
over products, another nonlinear function makes of them.  Whatever else of the inputs they meet then (a product from
the right, a product and a sum, an einsum of three, parts of the values, a gather) are values.

Scores of which nothing but the result is made, such as similarities that the model returns, are none's weights; nor
are those that a model's weights make of tokens, as routers, pooling by a learned query and synthesizers do.
"""

from tvm import relax

from relax_passes.bindings import Bindings, operator, static_shape
from relax_passes.length_origins import FEATURES, LengthOrigins
from relax_passes.other_attention import NONLINEAR, compares_pairs, is_outer

STRAY_WEIGHTS = "its weights meet the values in another way than by a product weights · values"
STRAY_CHOICE = "{} chooses among the values by q·kᵀ, which is no softmax"
STRAY_OTHERS = "{} turns q·kᵀ into weights that meet the values in another way than by a product"
SOFTMAXES = ("nn.softmax", "nn.log_softmax")
CHOICES = ("argmax", "topk", "argsort", "sort")
CONTRACTIONS = ("matmul", "einsum")


def stray_weights(bindings: Bindings, var: relax.Var, origins: LengthOrigins) -> str | None:
    """What is to be said of the softmax, choice or other nonlinear operator bound to `var`, None if nothing.

    Those that a matcher took, or refused, are not to be asked about.
    """
    call, name = bindings.value(var), operator(bindings.value(var))
    if name in (*SOFTMAXES, *CHOICES):
        if _are_of_pairs(bindings, call.args[0], origins) and _meets_values(bindings, var, call.args[0], origins, True):
            return STRAY_WEIGHTS if name in SOFTMAXES else STRAY_CHOICE.format(name)
    elif name in NONLINEAR and _contraction_before(bindings, call.args[0], origins):
        if _meets_values(bindings, var, call.args[0], origins, False):
            return STRAY_OTHERS.format(call.op.name)
    return None


def _are_of_pairs(bindings, scores, origins) -> bool:
    return compares_pairs(bindings, scores, origins.is_closed) or _contraction_before(bindings, scores, origins)


def _contraction_before(bindings, scores, origins) -> bool:
    """Whether `scores` are computed from a product or an einsum of pairs, without another one in between."""
    pending, seen = [scores], set()
    while pending:
        expr = pending.pop()
        call = bindings.value(expr)
        if operator(call) in CONTRACTIONS:
            if _pairs_tokens(bindings, expr, call, origins):
                return True
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
    operands = getattr(bindings.value(call.args[0]), "fields", [])
    inputs, _, output = str(call.attrs.subscripts).replace(" ", "").partition("->")
    free = []  # of each run-time operand, the dimensions that it gives to the result and that are no features
    for x, labels in zip(operands, inputs.split(",")):
        if not origins.is_closed(x) and "." not in labels and static_shape(x) is not None:
            free.append({label for i, label in enumerate(labels) if origins.of(x, i) != FEATURES} & {*output})
    return any(a - b and b - a for i, a in enumerate(free) for b in free[:i])


def _meets_values(bindings, weights, scores, origins, is_softmax: bool) -> bool:
    """Whether something computed from `weights` meets run-time values that are computed from neither.

    Behind another function than a softmax only by a contraction, a gather, or a product that is larger than both.
    """
    pending, seen, source = [weights], {weights}, bindings.value(scores)
    while pending:
        var = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            if reader in seen:
                continue
            name = operator(call)
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
    return name == "multiply" and len(shapes) == 2 and is_outer(*shapes)
