"""From a softmax to the product with v: what a model may do to the weights on the way.

    nan_to_num(p)        where(isnan(p), 0, p)        where(p == p, p, 0)
    where(keep, softmax(where(keep, s, -inf)), 0)        softmax(where(keep, s, fill)) * keep

Zeros in place of NaNs are the result of rows that keep nothing.  A weight is 0 already where a fill masked its score.
So the same mask, applied once more to the weights, changes only rows in which it leaves nothing: their result is 0,
whatever the fill was.  Another mask takes weight away without raising the others, which no softmax of fewer keys does.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from tvm import relax

from relax_passes.attention.spellings.softmax import Softmax
from relax_passes.attention.spellings.steps import NotAttention, Step
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.floats import FLOATS, keeps_precision
from relax_passes.ir.same_values import same

READ_TWICE = (
    "its weights have another reader or are an output of the model (of nn.MultiheadAttention: pass need_weights=False; "
    "of transformers: output_attentions=False)"
)
NOT = ("logical_not", "bitwise_not")
BETWEEN = "{} stands between the softmax and the values"


@dataclass(frozen=True)
class Kept:
    """Weights become 0, or are multiplied by 0 if `multiplies`, where a condition is false, or true if `negate`."""

    condition: relax.Expr
    negate: bool
    multiplies: bool
    operator: str


@dataclass
class Weights:
    """The way of the weights.

    product : the variable bound to the product with v
    met : the variable that is its left operand
    passed : the operators in between
    kept : the masks that were applied to the weights
    zeroes_nan : whether NaNs became 0
    """

    product: relax.Var
    met: relax.Var
    passed: list[relax.Call] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    zeroes_nan: bool = False


def follow_weights(bindings: Bindings, softmax: Softmax, known) -> Weights:
    """What the weights of a softmax go through.  Raises NotAttention unless a product with v alone reads them."""
    way = Weights(softmax.weights, softmax.weights)
    var = softmax.weights
    while True:
        readers = [x for x in bindings.readers[var] if softmax.summed is None or not x.same_as(softmax.summed)]
        if softmax.divided is None and (last := _without_nan(bindings, var)) is not None:
            way.zeroes_nan, var = True, last
            continue
        if len(readers) != 1 or var in bindings.outputs:
            raise NotAttention(BETWEEN.format(way.kept[0].operator) if way.kept else READ_TWICE)
        call = bindings.value(readers[0])
        name = operator(call)
        if name == "matmul":
            v = call.args[1]
            if not call.args[0].same_as(var) or v.same_as(var) or static_shape(v) is None:
                raise NotAttention("its weights are not the left operand of the product")
            if len(shape_of(v)) != len(shape_of(var)) or shape_of(call)[:-2] != shape_of(var)[:-2]:
                raise NotAttention(f"weights of shape {static_shape(var)} meet values of shape {static_shape(v)}")
            way.product, way.met = readers[0], var
            return way
        keeps = bindings.same_elements(call) is not None and shape_of(call)[-2:] == shape_of(var)[-2:]
        if not (keeps or name == "astype" or name == "broadcast_to" and static_shape(call) == static_shape(var)):
            kept = None if softmax.divided is not None else _kept(bindings, call, var, known)
            if kept is None:
                raise NotAttention(BETWEEN.format(call.op.name if name else "a function"))
            way.kept.append(kept)
        way.passed.append(call)
        var = readers[0]


def check_precision(way: Weights, source_dtype: str):
    """NotAttention if weights are rounded to a dtype with less precision than `source_dtype`, that of q and k.

    The dtype of the product with v is allowed, too.
    """
    for call in way.passed:
        dtype = dtype_of(call)
        if dtype not in FLOATS or not (keeps_precision(dtype, source_dtype) or dtype == dtype_of(way.product)):
            raise NotAttention(f"its weights are rounded to {dtype}")


def masked_once(bindings: Bindings, way: Weights, steps: list[Step], empty_rows: str, known) -> tuple[list[Step], str]:
    """(steps, empty rows) where what masks scores masks weights, too: fills are -inf, and no row averages over them.

    Raises NotAttention unless the masks of the weights are those of the scores.
    """
    if way.kept:
        fills = [step for step in steps if step.kind == "fill"]
        of_scores = [x for step in fills for x in _conditions(bindings, step.operand, step.negate)]
        of_weights = [x for kept in way.kept for x in _conditions(bindings, kept.condition, kept.negate)]
        if not (
            fills and _imply(bindings, of_scores, of_weights, known) and _imply(bindings, of_weights, of_scores, known)
        ):
            reason = BETWEEN.format(way.kept[0].operator)
            raise NotAttention(f"{reason}, and what it keeps is not what the scores' own mask keeps")
        if any(step.kind == "add" and _may_be_infinite(step.operand, known) for step in steps):
            raise NotAttention("its weights are masked again, and what is added to its scores may be infinite")
        empty_rows = _masked_rows(way.kept, fills, steps, empty_rows)
        steps = [replace(x, number=-math.inf) if x.kind == "fill" else x for x in steps if x.kind != "floor"]
    return steps, "zero" if way.zeroes_nan else empty_rows


def _masked_rows(kept: list[Kept], fills: list[Step], steps: list[Step], empty_rows: str) -> str:
    """The result of a row that masks leave nothing of, applied to scores and to weights.

    0 in place of a NaN is 0, and so is an average times 0; but NaN * 0 is NaN.
    """
    is_infinite = {step.number == -math.inf for step in fills}
    if True not in is_infinite and not any(step.kind == "cast" and step.dtype == "float16" for step in steps):
        return "zero"
    multiplies = {x.multiplies for x in kept}
    if multiplies == {False}:
        return "zero"
    if True in multiplies and (multiplies != {True} or is_infinite != {True} or any(x.kind == "floor" for x in steps)):
        raise NotAttention("its weights are multiplied by a mask that also replaces scores, by several numbers")
    return empty_rows


def _may_be_infinite(summand, known) -> bool:
    if known.is_closed(summand):
        return not np.isfinite(known.values([summand])[0]).all()
    return not math.isfinite(known.magnitudes.of(summand))


def _without_nan(bindings, var) -> relax.Var | None:
    """The variable of the weights `var` with zeros in place of NaNs, where nothing else reads them; else None.

    Weights are never infinite: what `nan_to_num` does to infinities changes nothing.
    """
    tests = _tests(bindings, var)
    choices, here, is_zeroed = set(), var, False
    while here not in bindings.outputs:
        readers = [x for x in dict.fromkeys(bindings.readers[here]) if x not in tests]
        call = bindings.call(readers[0], "where") if len(readers) == 1 else None
        if call is None or call.args[0] not in tests or static_shape(call) != static_shape(var):
            break
        state = tests[call.args[0]]  # where the condition holds: at NaNs, elsewhere than at them, nowhere
        chosen, other = (call.args[1], call.args[2]) if state == "numbers" else (call.args[2], call.args[1])
        if not chosen.same_as(here):
            return None
        if state != "nowhere":
            if bindings.scalar(other) != 0:
                raise NotAttention("NaNs among its weights are replaced by another number than 0")
            is_zeroed = True
        choices.add(readers[0])
        here = readers[0]
    read = {reader for test in tests for reader in bindings.readers[test]}
    return here if is_zeroed and read <= {*tests, *choices} and not {*tests} & bindings.outputs else None


def _tests(bindings, var) -> dict[relax.Var, str]:
    """The conditions on the weights `var` that say where they are "nan", or "numbers"; or that hold "nowhere"."""
    tests: dict[relax.Var, str] = {}
    for reader in dict.fromkeys(bindings.readers[var]):
        call = bindings.value(reader)
        name = operator(call)
        if name == "isnan":
            tests[reader] = "nan"
        elif name in ("equal", "not_equal"):
            if call.args[0].same_as(var) and call.args[1].same_as(var):
                tests[reader] = "numbers" if name == "equal" else "nan"
            elif name == "equal" and any(math.isinf(bindings.scalar(x) or 0.0) for x in call.args):
                tests[reader] = "nowhere"
        elif name == "isinf":
            tests[reader] = "nowhere"
    opposite = {"nan": "numbers", "numbers": "nan"}
    for test in list(tests):
        for reader in bindings.readers[test]:
            if operator(bindings.value(reader)) in NOT and tests[test] in opposite:
                tests[reader] = opposite[tests[test]]
    return tests


def _kept(bindings, call, var, known) -> Kept | None:
    """The mask by which an operator sets weights to 0, or None."""
    name = operator(call)
    if static_shape(call) != static_shape(var):
        return None
    if name == "where" and dtype_of(call.args[0]) == "bool":
        for index in (1, 2):
            if call.args[index].same_as(var) and bindings.scalar(call.args[3 - index]) == 0:
                return Kept(call.args[0], index == 2, False, call.op.name)
    if name == "multiply":
        mask = call.args[1] if call.args[0].same_as(var) else call.args[0]
        if mask.same_as(var):
            return None
        cast = bindings.call(mask, "astype")
        if cast is not None and dtype_of(cast.args[0]) == "bool":
            return Kept(cast.args[0], False, True, call.op.name)
        if known.is_closed(mask) and np.isin(known.values([mask])[0], (0, 1)).all():
            return Kept(mask, False, True, call.op.name)
    return None


def _conditions(bindings, condition, negate: bool) -> list[tuple[relax.Expr, bool]]:
    """Conditions, each of them negated or not, that hold together where `condition` holds, or does not if `negate`."""
    call = bindings.value(condition)
    name = operator(call)
    if name in NOT:
        return _conditions(bindings, call.args[0], not negate)
    if name in (("logical_or", "bitwise_or") if negate else ("logical_and", "bitwise_and")):
        return [x for argument in call.args for x in _conditions(bindings, argument, negate)]
    if name == "broadcast_to" and len(shape_of(call)) == len(shape_of(call.args[0])):
        return _conditions(bindings, call.args[0], negate)
    if name == "astype" and dtype_of(call.args[0]) == "bool":
        return _conditions(bindings, call.args[0], negate)
    if name == "equal" and bindings.scalar(call.args[1]) == 0:  # of zeros and ones, as of a mask of numbers
        inner = bindings.value(call.args[0])
        if operator(inner) == "astype" and dtype_of(inner.args[0]) == "bool":
            return _conditions(bindings, inner.args[0], not negate)
    return [(condition, negate)]


def _imply(bindings, given, wanted, known) -> bool:
    """Whether all of `wanted` are among `given`, or are constants that hold wherever the constants of `given` do."""
    missing = [(x, n) for x, n in wanted if not any(n == m and same(bindings, x, y) for y, m in given)]
    constants = [(x, n) for x, n in given if known.is_closed(x)]
    if not missing:
        return True
    if not constants or not all(known.is_closed(x) for x, _ in missing):
        return False
    values = known.values([x for x, _ in (*constants, *missing)])
    holds = [(x != 0) != negate for x, (_, negate) in zip(values, (*constants, *missing))]
    everywhere = np.logical_and.reduce(np.broadcast_arrays(*holds[: len(constants)]))
    return all((~everywhere | wanted).all() for wanted in holds[len(constants) :])
