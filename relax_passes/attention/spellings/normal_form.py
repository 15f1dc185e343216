"""The steps of attention scores in the composite's form: softmax(scale * q·kᵀ + bias | mask), with fills resolved.

What each step means to the softmax of a row:

- A tanh, with only factors before it, is a softcap: a * tanh(b * q·kᵀ) has the scale a * b and the softcap |a|, because
  tanh is odd.
- A factor multiplies scale, bias and fills alike.  After a summand, a fill or a floor it must be positive: a negative
  factor would give masked scores the most weight, and 0 times -inf is NaN.
- A tensor of factors, one for each head, query or key, multiplies q or k instead.  It must come first: no mask, bias or
  cap would be multiplied with it.
- A summand is added to the bias, exactly, whatever its values are.
- A fill of -inf is a mask.  A later finite fill of the same place makes it finite again.
- A finite fill f replaces scores.  A bias can express that only if scores are negligible beside f.  Then f gives weight
  0 beside any kept score, and several fills keep their order.  A row of nothing but fills spreads its weight evenly
  over the largest of them, as in PyTorch.  A fill counts as such an f in three cases:

  1. f <= -1e30, or f <= -32752 filled into float16 scores: finite scores that low do not occur in a computation that
     has not overflowed;
  2. f is below all scores that are possible, as far as weights and norms bound their magnitude (magnitudes.py);
  3. f <= -1e8, with a note to the user that scores within 5e7 of 0 are assumed.

  Every other finite fill is refused: -1e4 would not mask beside scores of -1e6.
- A summand after a finite fill f is added to f as well.  This is exact if f <= -1e30 absorbs the summand and nothing
  that is known at compile time lifts f up again; otherwise it is refused.
- A floor turns scores of -inf into a finite fill.  A floor above -1e30 is a bound of the model's own and is refused,
  unless it is the least float16 and nothing has masked the scores yet.
- A cast to float16 turns fills below -65504 into -inf.
- The composite computes in float32 and rounds nothing.  So a cast to a dtype narrower than q and k is refused.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from relax_passes.attention.spellings.steps import NotAttention, Step
from relax_passes.ir.bindings import in_dtype
from relax_passes.ir.floats import keeps_precision

ABSORBING = -1e30  # a float32 score added to this, or to anything lower, is lost in rounding
HALF_ABSORBING = -32752.0  # half of the least float16
HALF_LEAST = -65504.0  # as a floor it changes no finite score
HALF_FACTOR = 1 / 16  # such a fill times this factor stays far below scores times the same factor
ASSUMED = -1e8
REMEDY = "fill with -inf or torch.finfo(dtype).min, or use a boolean mask of scaled_dot_product_attention"
LEAST_CAP = 1e-30  # of a softcap; its inverse is the largest
UNDERFLOW = 104.0  # exp(-104) is 0 in float32
LEAST = -3.4028234663852886e38
ASSUMED_NOTE = "a fill of {:g} is taken as a mask: scores within ±{:g} are assumed"


@dataclass(frozen=True)
class Fill:
    """Scores become `value` where the operand drops them: -inf, or a finite number in place of the step's own."""

    step: Step
    value: float


@dataclass
class NormalForm:
    """The scale and the softcap of the scores, and the operations that make their bias and mask.

    Bias and mask begin empty.  `operations` change them in order: each is a Fill, or a Step for the bias ("add",
    "scale", "cast" or "floor").
    """

    scale: float
    steps: list[Step] = field(default_factory=list)  # as the model has them
    operations: list[Step | Fill] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    softcap: float | None = None

    @property
    def masks_by_infinity_only(self) -> bool:
        """Whether nothing but fills of -inf may take a row's scores far below 0."""
        finite = any(isinstance(x, Fill) and x.value != -math.inf for x in self.operations)
        return not finite and not any(step.kind in ("add", "floor") for step in self.steps)


def normal_form(
    steps: list[Step], scale: float, source_dtype: str, score_bound: float, bound_of, largest_of
) -> NormalForm:
    """The normal form of scores that were computed in the dtype `source_dtype` and went through the steps.

    `score_bound` bounds |q·kᵀ| before `scale` and the steps, `bound_of` gives the bound of a summand, and `largest_of`
    the largest number that a step adds; all are inf where nothing is known.  Raises NotAttention where the composite
    cannot express the steps.
    """
    for step in steps:
        if step.kind == "cast" and not keeps_precision(step.dtype, source_dtype):
            raise NotAttention(f"the scores are rounded from {source_dtype} to {step.dtype}")
    _check_factors(steps, scale)
    _check_shifts(steps)
    form = NormalForm(scale, steps)
    finals = {i: _final_value(steps, i) for i, step in enumerate(steps) if step.kind == "fill"}
    finite = [i for i, value in finals.items() if value != -math.inf]
    first = min([*finite, *(i for i, step in enumerate(steps) if step.kind == "floor")], default=len(steps))
    is_added_to = any(step.kind == "add" for step in steps[first:])
    for step in steps:
        if step.kind == "scale":
            form.scale *= step.number
    if not math.isfinite(form.scale):
        raise NotAttention(f"its scale overflows to {form.scale:g}")
    form.softcap = _softcap(steps, form.scale)
    if is_added_to:
        _check_absorbing(steps, first, bound_of, largest_of)
        form.operations = [Fill(step, step.number) if step.kind == "fill" else step for step in steps]
    else:
        summands = [step.operand for step in steps if step.kind == "add"]
        bias_bound = sum(map(bound_of, summands)) * max(1.0, _growth(steps))
        bound = abs(form.scale) * score_bound if math.isfinite(score_bound) else math.inf
        bound = bound if form.softcap is None else min(bound, form.softcap)
        bound *= 2 if any(step.kind == "shift" for step in steps) else 1
        for i in finite:
            _check_masks(steps, i, finals[i], bound, bias_bound, bool(summands), form.notes)
        levels = _levels({finals[i] for i in finite})
        # Fills may come last: nothing is added after them, and `finals` holds what the other steps make of them.
        form.operations = [step for step in steps if step.kind != "fill"]
        form.operations += [Fill(steps[i], levels.get(value, -math.inf)) for i, value in finals.items()]
    form.operations = [x for x in form.operations if isinstance(x, Fill) or x.kind not in ("shift", "tanh", "factor")]
    return form


def _softcap(steps, scale) -> float | None:
    """What bounds the scores: the factors after a tanh; None without one."""
    kinds = [step.kind for step in steps]
    if "tanh" not in kinds:
        return None
    softcap = abs(math.prod(step.number for step in steps[kinds.index("tanh") :] if step.kind == "scale"))
    if not LEAST_CAP <= softcap <= 1 / LEAST_CAP or abs(scale / softcap) > 1 / LEAST_CAP:
        raise NotAttention(f"its scores are capped at {softcap:g} after a factor of {scale:g}")
    return softcap


def _check_factors(steps, scale):
    """NotAttention for a misplaced factor of 0 or less, a floor above `ABSORBING`, or a scale that is not finite."""
    is_masked = False
    kinds = [step.kind for step in steps]
    if "factor" in kinds:
        before = {*kinds[: len(kinds) - kinds[::-1].index("factor")]} & {"add", "fill", "floor", "shift", "tanh"}
        if before:
            raise NotAttention("scores are multiplied by a tensor after they were masked, biased or capped")
    for step in steps:
        if step.kind == "scale" and is_masked and step.number <= 0:
            raise NotAttention(f"masked or biased scores are multiplied by {step.number:g}")
        is_least = step.dtype == "float16" and not is_masked and step.number <= HALF_LEAST
        if step.kind == "floor" and step.number > ABSORBING and not is_least:
            raise NotAttention(f"maximum of the scores with {step.number:g}, which is a bound of the model's own")
        is_masked = is_masked or step.kind in ("add", "fill", "floor")
    if not math.isfinite(scale):
        raise NotAttention(f"its scale is {scale:g}")


def _check_shifts(steps):
    """NotAttention for fills after a shift in rows filled or biased before it: they mean another score in each row."""
    kinds = [step.kind for step in steps]
    if "shift" in kinds:
        at = kinds.index("shift")
        if {"fill", "floor"} & set(kinds[at:]) and {"fill", "floor", "add"} & set(kinds[:at]):
            raise NotAttention("masked scores are taken relative to their rows' maxima and masked again")


def _final_value(steps, index) -> float:
    """The value of a fill at the softmax if nothing is added to it."""
    value = steps[index].number
    for step in steps[index + 1 :]:
        if step.kind == "scale":
            value *= step.number
        if step.kind == "floor":
            value = max(value, step.number)
        value = in_dtype(value, step.dtype)
    return value


def _growth(steps) -> float:
    """An upper bound of the factors that a summand meets."""
    return math.prod(max(1.0, step.number) for step in steps if step.kind == "scale")


def _check_absorbing(steps, first, bound_of, largest_of):
    """NotAttention unless every finite fill, and every floor, absorbs whatever is added to it afterwards."""
    for i, step in enumerate(steps[first:], first):
        if step.dtype in ("float16", "float64"):
            raise NotAttention(f"something is added to {step.dtype} scores that were filled with {step.number:g}")
        if step.kind == "fill" and max(step.number, _final_value(steps, i)) > ABSORBING:
            raise NotAttention(f"something is added to scores that were filled with {step.number:g}")
        if step.kind == "scale" and not 1e-4 <= step.number <= 1:
            raise NotAttention(f"filled scores are multiplied by {step.number:g} before something is added to them")
        if step.kind != "add" or not -ABSORBING / 10 < (bound := bound_of(step.operand)) < math.inf:
            continue
        if largest_of(step) > -ABSORBING / 10:  # a mask that is added may take off as much as it likes
            raise NotAttention(f"filled scores are shifted by up to {bound:g}")


def _check_masks(steps, index, value, bound, bias_bound, has_bias, notes):
    """NotAttention unless a finite fill, `value` at the softmax, gives weight 0 beside any score that is kept."""
    step = steps[index]
    if value <= ABSORBING:
        return
    if has_bias and bias_bound > -value / 4:
        raise NotAttention(
            f"where replaces scores by {step.number:g}, which does not mask below what is added to them: {REMEDY}"
        )
    if value + UNDERFLOW <= -(bound + bias_bound):
        return
    is_least = step.dtype == "float16" and step.number <= HALF_ABSORBING and value <= step.number * HALF_FACTOR
    if is_least:
        return
    if value > ASSUMED:
        raise NotAttention(
            f"where replaces scores by {step.number:g}, and nothing says that they stay above it: {REMEDY}"
        )
    note = ASSUMED_NOTE.format(step.number, -value / 2)
    if note not in notes:
        notes.append(note)


def _levels(values: set[float]) -> dict[float, float]:
    """The number in place of each finite fill, in the same order: the fill if all absorb scores, else one that does."""
    if all(LEAST <= value <= ABSORBING for value in values):
        return {value: value for value in values}
    ordered = sorted(values)
    if any(b - a < 10 * UNDERFLOW for a, b in zip(ordered, ordered[1:])):
        raise NotAttention(f"where replaces scores by {ordered[0]:g} and by {ordered[1]:g}, too close to each other")
    return {value: float(np.float32(LEAST / 2**i)) for i, value in enumerate(ordered)}
