"""Finding attention spelled by hand: from a softmax back to q·kᵀ and forward to the product with v.

    softmax(floor(where(keep, scale * (q kᵀ) + bias, fill))) v       in any order, any number of times, reshaped between

The match is read-only and names what it found in the function's own variables; `CanonicalizeAttention` emits it.
"""

from dataclasses import dataclass, field

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.bindings import (
    Bindings,
    dtype_of,
    element_count,
    operator,
    permutation,
    shape_of,
    static_shape,
    strip_reshapes,
)

MASKING = -1e4  # a score this far below the others has weight 0 in float32 (exp underflows at -104)


class NotAttention(Exception):
    """Why a softmax between two matrix products is not an attention that the composite can express."""


@dataclass(frozen=True)
class Step:
    """What happens to the scores, whose shape at this point is `shape`.

    kind is "scale" (multiply by `number`), "add" (`operand`, subtracted if `negate`), "fill" (scores become `number`
    where the boolean `operand` is false, or true if `negate`) or "floor" (at least `number`).
    """

    kind: str
    shape: tuple[int, ...]
    number: float = 0.0
    operand: relax.Expr | None = None
    negate: bool = False


@dataclass
class AttentionMatch:
    """One attention: operands as variables of the function, of any rank, and the steps from q·kᵀ to the softmax.

    The lengths of k's last two dimensions are swapped (D, Skv) if `k_is_transposed`.  `out` is the variable bound to
    the product with v.  `batch_and_heads` is (B, H) if some shape along the way tells them apart.
    """

    site: str
    q: relax.Expr
    k: relax.Expr
    v: relax.Expr
    k_is_transposed: bool
    scale: float
    steps: list[Step]
    scores_shape: tuple[int, ...]
    out: relax.Var
    batch_and_heads: tuple[int, int] | None
    spelling: str = field(init=False)

    def __post_init__(self):
        names = {"add": "add", "fill": "where", "floor": "maximum"}
        kinds = [names[step.kind] for step in self.steps if step.kind in names]
        self.spelling = f"softmax({'+'.join(dict.fromkeys(kinds)) or 'matmul'})"


def match_softmax(bindings: Bindings, var: relax.Var) -> AttentionMatch | None:
    """The attention around the softmax that `var` is bound to; None if there is no product before or after it.

    Raises NotAttention with the reason if there are both, but the composite cannot express what lies between.
    """
    softmax = bindings.value(var)
    rank = len(softmax.ty.shape)
    if softmax.attrs.axis not in (-1, rank - 1) or rank < 2:
        return None
    if not (_leads_to_product(bindings, var) and _comes_from_product(bindings, softmax.args[0])):
        return None
    if static_shape(softmax) is None:
        raise NotAttention(f"its scores have the symbolic shape {list(softmax.ty.shape)}")
    weights, product = _follow_weights(bindings, var)
    chain = _Scores(bindings)
    scores, steps = chain.trace(softmax.args[0])
    _refuse_negative_scale(steps)
    _check_shared("keys", shape_of(scores.args[1]), shape_of(scores)[:-2])
    _check_shared("values", shape_of(bindings.value(product).args[1]), shape_of(weights)[:-2])
    q, q_scale = _strip_scales(bindings, scores.args[0])
    k, k_scale, k_is_transposed = _strip_transpose(bindings, scores.args[1])
    v = strip_reshapes(bindings, bindings.value(product).args[1])
    q, k, v = _strip_upcasts(bindings, q, k, v)
    shapes = [static_shape(scores), *chain.shapes, static_shape(weights), static_shape(q)]
    return AttentionMatch(
        site_of(softmax),
        q,
        k,
        v,
        k_is_transposed,
        q_scale * k_scale,
        steps,
        shape_of(scores),
        product,
        next((shape[:2] for shape in shapes if len(shape) == 4), None),
    )


def site_of(softmax: relax.Call) -> str:
    """The module path in the softmax's span; a span with a line is a place in a script and says nothing of modules."""
    return softmax.span.source_name.name if softmax.span is not None and softmax.span.line == 0 else ""


class _Scores:
    """Walks from the softmax's operand back to q·kᵀ, collecting the steps in the order of computation."""

    def __init__(self, bindings):
        self.bindings = bindings
        self.shapes = []  # of reshaped scores

    def trace(self, expr) -> tuple[relax.Call, list[Step]]:
        call = self.bindings.value(expr)
        name = operator(call)
        if name == "matmul":
            if _is_scores(self.bindings, call):
                return call, []
            raise NotAttention("the product before the softmax has a constant operand or other leading dimensions")
        step = getattr(self, f"_{name}", None)
        if step is None:
            inner = self.bindings.same_elements(call)
            if inner is not None:
                return self._reshaped(call, inner)
            raise NotAttention(f"{call.op.name if name else 'a variable'} stands between q·kᵀ and the softmax")
        return step(call)

    def _reshaped(self, call, inner):
        before, after = shape_of(inner), shape_of(call)
        if before[-2:] != after[-2:]:
            raise NotAttention(f"the scores are reshaped from {before} to {after}")
        self.shapes += [after, before]
        return self.trace(inner)

    def _extend(self, call, inner, step):
        before, after = static_shape(inner), static_shape(call)
        if before != after:
            raise NotAttention(f"{call.op.name} broadcasts the scores from {before} to {after}")
        scores, steps = self.trace(inner)
        return scores, [*steps, step]

    def _multiply(self, call):
        number, inner = _scaled_by(self.bindings, call)
        if number is None:
            raise NotAttention(f"{call.op.name} of the scores by a tensor")
        return self._extend(call, inner, Step("scale", shape_of(call), number))

    _divide = _multiply

    def _add(self, call):
        refusals = []
        for index in (0, 1):
            try:
                step = Step("add", shape_of(call), operand=call.args[1 - index])
                return self._extend(call, call.args[index], step)
            except NotAttention as refusal:
                refusals.append(refusal)
        is_scores = [_comes_from_product(self.bindings, arg) for arg in call.args]
        raise refusals[1] if is_scores == [False, True] else refusals[0]

    def _subtract(self, call):
        return self._extend(call, call.args[0], Step("add", shape_of(call), operand=call.args[1], negate=True))

    def _where(self, call):
        condition, *values = call.args
        for index in (1, 0):
            number = self.bindings.scalar(values[index])
            if number is None:
                continue
            if number > MASKING:
                raise NotAttention(f"where replaces scores by {number:g}; a mask's fill value is at most {MASKING:g}")
            step = Step("fill", shape_of(call), number, condition, negate=index == 0)
            return self._extend(call, values[1 - index], step)
        raise NotAttention("where chooses between scores and a tensor")

    def _maximum(self, call):
        for index in (1, 0):
            number = self.bindings.scalar(call.args[index])
            if number is not None and number <= MASKING:
                return self._extend(call, call.args[1 - index], Step("floor", shape_of(call), number))
        raise NotAttention(f"maximum of the scores with something above {MASKING:g}")

    def _astype(self, call):
        return self.trace(call.args[0])

    def _broadcast_to(self, call):
        if static_shape(call) != static_shape(call.args[0]):
            raise NotAttention(f"the scores are broadcast from {static_shape(call.args[0])} to {static_shape(call)}")
        return self.trace(call.args[0])


def _is_scores(bindings, matmul) -> bool:
    """Whether this is q·kᵀ of equal ranks, not a projection by a weight."""
    a, b = (static_shape(x) for x in matmul.args)
    if a is None or b is None or len(a) != len(b) or shape_of(matmul)[:-2] != a[:-2]:
        return False
    return len(a) > 2 or not any(isinstance(_source(bindings, x), GenericConst) for x in matmul.args)


def _check_shared(name, shape, lead):
    """Keys and values have the scores' leading dimensions, or 1 in the last of them: heads shared by a group."""
    given = shape[:-2]
    shared = [n for n, full in zip(given, lead) if n != full]
    if len(given) != len(lead) or any(n != 1 for n in shared):
        raise NotAttention(f"{name} of shape {shape} do not meet scores with the leading dimensions {lead}")
    if shared and (given[0] != lead[0] or given[len(given) - len(shared) :] != (1,) * len(shared)):
        raise NotAttention(f"{name} of shape {shape} are shared by all batches")


def _source(bindings, expr):
    """What `expr` is a reshaped or transposed view of."""
    while (call := bindings.call(expr, "permute_dims", "reshape", "astype")) is not None:
        expr = call.args[0]
    return bindings.value(expr)


def _follow_weights(bindings, var):
    """(weights, product): the product with v that alone reads the softmax, and its left operand."""
    while True:
        readers = bindings.readers[var]
        if len(readers) != 1 or var in bindings.outputs:
            raise NotAttention("its weights have another reader or are an output of the model")
        call = bindings.value(readers[0])
        name = operator(call)
        if name == "matmul":
            v = call.args[1]
            if not call.args[0].same_as(var) or v.same_as(var) or static_shape(v) is None:
                raise NotAttention("its weights are not the left operand of the product")
            if len(shape_of(v)) != len(shape_of(var)) or shape_of(call)[:-2] != shape_of(var)[:-2]:
                raise NotAttention(f"weights of shape {static_shape(var)} meet values of shape {static_shape(v)}")
            return var, readers[0]
        keeps = bindings.same_elements(call) is not None and shape_of(call)[-2:] == shape_of(var)[-2:]
        if not (keeps or name == "astype" or name == "broadcast_to" and static_shape(call) == static_shape(var)):
            raise NotAttention(f"{call.op.name if name else 'a function'} stands between the softmax and the values")
        var = readers[0]


def _leads_to_product(bindings, var) -> bool:
    """Whether a matmul reads the weights from the left, through operators that keep their number of elements."""
    pending, seen = [var], set()
    while pending:
        var = pending.pop()
        for reader in bindings.readers[var]:
            call = bindings.value(reader)
            if operator(call) == "matmul" and call.args[0].same_as(var):
                return True
            if reader not in seen and operator(call) and element_count(call) == element_count(var):
                seen.add(reader)
                pending.append(reader)
    return False


def _comes_from_product(bindings, expr) -> bool:
    """Whether a product like q·kᵀ is behind `expr`, through operators that keep the number of elements."""
    pending, seen = [expr], set()
    while pending:
        expr = pending.pop()
        call = bindings.value(expr)
        if operator(call) == "matmul":
            if all(len(x.ty.shape) > 1 for x in call.args) and len(call.args[0].ty.shape) == len(call.args[1].ty.shape):
                return True
        elif operator(call):
            for arg in call.args:
                if isinstance(arg, relax.Var) and arg not in seen and element_count(arg) == element_count(call):
                    seen.add(arg)
                    pending.append(arg)
    return False


def _refuse_negative_scale(steps):
    masked = False
    for step in steps:
        if step.kind == "scale" and step.number < 0 and masked:
            raise NotAttention(f"masked scores are multiplied by {step.number:g}")
        masked = masked or step.kind != "scale"


def _strip_scales(bindings, expr):
    """`expr` before multiplications by numbers and reshapes of its leading dimensions, and the numbers' product."""
    scale = 1.0
    while True:
        expr = strip_reshapes(bindings, expr)
        call = bindings.call(expr, "multiply", "divide")
        if call is None:
            return expr, scale
        number, inner = _scaled_by(bindings, call)
        if number is None or static_shape(inner) != static_shape(call):
            return expr, scale
        scale, expr = scale * number, inner


def _scaled_by(bindings, call):
    """(number, x) where the call is number * x, or (None, None)."""
    divide = operator(call) == "divide"
    for index in (1,) if divide else (1, 0):
        number = bindings.scalar(call.args[index])
        if number is not None and number != 0:
            return (1.0 / number if divide else number), call.args[1 - index]
    return None, None


def _strip_transpose(bindings, expr):
    """The same for kᵀ, looking through a transpose of the last two dimensions: (k, scale, is it still transposed)."""
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
    """q and k before a cast to float32 that only the scores needed: the kernel accumulates in float32 anyway."""

    def narrow(x):
        call = bindings.call(x, "astype")
        return call.args[0] if call is not None and dtype_of(call.args[0]) == dtype_of(v) else x

    return (q, k, v) if dtype_of(q) == dtype_of(v) else (narrow(q), narrow(k), v)
