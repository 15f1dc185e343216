"""How far results are from PyTorch's, and how far they may be.

A result that agrees with PyTorch's in the same dtype to a few roundings, row by row, is right; then nothing else is
computed.  In doubt the rule is that of the project's kernels: the error against a wider computation (float64 for
float32, float32 for half precision) is at most a small multiple of PyTorch's own error.  Where PyTorch's own error
happens to be small, what counts instead is the change of its result when weights and inputs move by a rounding.  NaN
and infinities must be in the same positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

CHUNK = 1 << 18  # elements compared at a time: about what a cache near a core holds
# Allowed differences from PyTorch in the same dtype, over the largest value of a row, without any further check.
CLOSE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# PyTorch's own errors, over the largest value, above which the exported program is checked: it may be another model.
LARGE = {torch.float64: 1e-6, torch.float32: 1e-2, torch.float16: 1e-1, torch.bfloat16: 2e-1}
MOST_TIMES = 16.0  # the most that such an error may be, in multiples of the exported program's own error
# In doubt, the allowed error is TIMES PyTorch's own error, plus ROUNDING times the largest value.
TIMES = {torch.float64: 4.0, torch.float32: 4.0, torch.float16: 2.0, torch.bfloat16: 2.0}
ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}

# How far off a count, a sum or a rounded number may be, in multiples of what a rounding changes one of PyTorch's by.
FAR = 4.0

_WITHIN_FLOAT32 = {torch.float16, torch.bfloat16, torch.float32}


@dataclass(frozen=True)
class Difference:
    """How far one tensor is from another: the largest `error`, and `scale`, the other's largest finite value.

    `is_close`: each element differs by at most CLOSE of its row's largest value; `elsewhere`: how many elements are
    not finite in one of the two only, or in both but not alike.
    """

    error: float
    scale: float
    is_close: bool
    elsewhere: int


def difference(
    actual: torch.Tensor,
    expected: torch.Tensor,
    beside: torch.Tensor | None = None,
    precision: torch.dtype | None = None,
) -> Difference:
    """How `actual` differs from `expected`; where `beside`, if given, is not finite, nothing is compared.

    `is_close` goes by the roundings of `precision`, by default the dtype of `expected`.

    The tensors have one shape, and any dtypes and devices.  Copies of CHUNK elements at a time are compared, in float32
    if it holds all of the dtypes and no difference overflows, else in float64.
    """
    tensors = [x for x in (actual, expected, beside) if x is not None]
    tolerance = CLOSE.get(precision or expected.dtype, 0.0)
    if all(x.dtype in _WITHIN_FLOAT32 for x in tensors):
        found = _difference(tensors, torch.float32, tolerance)
        if math.isfinite(found.error):
            return found
    return _difference(tensors, torch.float64, tolerance)


def _difference(tensors: list[torch.Tensor], dtype: torch.dtype, tolerance: float) -> Difference:
    width = tensors[1].shape[-1] if tensors[1].dim() else 1
    rows = [x.detach().reshape(-1, max(1, width)) for x in tensors]
    error, scale, is_close, elsewhere = 0.0, 0.0, True, 0
    step = max(1, CHUNK // max(1, width))
    for first in range(0, rows[0].shape[0], step):
        x, y, *rest = (_wide(part[first : first + step], dtype) for part in rows)
        if not x.numel():
            continue
        apart, sizes = (x - y).abs_(), y.abs()
        if rest or not apart.max().isfinite():  # a difference with a value that is not finite is not finite
            finite = x.isfinite() & y.isfinite()
            alike = finite | (x == y) | (x.isnan() & y.isnan())
            if rest:
                finite, alike = finite & rest[0].isfinite(), alike | ~rest[0].isfinite()
            apart, sizes = torch.where(finite, apart, 0.0), torch.where(finite, sizes, 0.0)
            elsewhere += int((~alike).sum())
        apart, sizes = apart.amax(-1), sizes.amax(-1)
        error, scale = max(error, apart.max().item()), max(scale, sizes.max().item())
        is_close = is_close and bool((apart <= tolerance * sizes).all())
    return Difference(error, scale, is_close and elsewhere == 0, elsewhere)


@dataclass(frozen=True)
class Verdict:
    """Whether an output is right: the largest difference `error`, the largest value `scale`, the `rule` in words."""

    is_right: bool
    error: float
    scale: float
    rule: str

    def __str__(self) -> str:
        return f"largest difference {self.error:.2g} where values reach {self.scale:.2g}; {self.rule}"


Compute = Callable[[], torch.Tensor | None]


def judge(
    actual,
    expected,
    wider: Compute,
    moved: Compute,
    summed: Compute = lambda: None,
    precision: torch.dtype | None = None,
    is_choice: Callable[[], bool] = lambda: True,
) -> "Verdict":
    """The Verdict on a tensor.

    `expected` is PyTorch's result in the same dtype.  The callables are called in doubt only.  They give PyTorch's
    result, or None where it cannot be computed: `wider()` in a wider dtype, `moved()` in the same dtype with weights
    and inputs moved by a rounding, `summed()` with the results of sums moved, too.  Floating-point results are judged
    by the roundings of `precision`, by default their own dtype: those of products in tf32 are float16's.
    `is_choice()` tells of integers, in doubt, whether they follow from an order of numbers (choices.py).
    """
    precision = (precision or expected.dtype) if expected.dtype.is_floating_point else expected.dtype
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        rule = f"it is {_kind(actual)} where PyTorch's is {_kind(expected)}"
        return Verdict(False, math.inf, 0.0, rule)
    found = difference(actual, expected, None, precision)
    is_float = expected.dtype.is_floating_point or expected.dtype.is_complex
    if found.is_close and (is_float or torch.equal(actual, expected)):  # float64 does not hold all of int64
        return Verdict(True, found.error, found.scale, f"as PyTorch in {_name(expected, precision)}")
    if not expected.dtype.is_floating_point:
        return _judge_integers(actual, expected, found, (wider, moved, summed), is_choice)
    if (reference := wider()) is None:
        reference = expected
    own = difference(expected, reference, expected)
    known = _without_overflow(actual, expected, reference)
    elsewhere = difference(actual, known).elsewhere if found.elsewhere else 0
    ours = difference(actual, reference, known)
    noise, times = own.error, TIMES.get(precision, 2.0)
    if noise > LARGE[precision] * own.scale and (other := moved()) is not None:
        exported = difference(other, reference, expected).error
        if noise > MOST_TIMES * exported + ROUNDING[precision] * own.scale:
            rule = f"the model is {noise:.2g} from what torch.export made of it, in a wider dtype: it is another"
            return Verdict(False, found.error, found.scale, rule)
    for disturbed in (moved, summed):
        if elsewhere == 0 and ours.error > times * noise + ROUNDING[precision] * own.scale:
            if (other := disturbed()) is not None:
                noise = max(noise, difference(other, expected).error)
    allowed = times * noise + ROUNDING[precision] * own.scale
    if elsewhere:
        rule = f"{elsewhere} elements are NaN or infinite in one of the two only"
    else:
        rule = f"the error is {ours.error:.2g}, PyTorch's own {own.error:.2g}, allowed is {allowed:.2g}"
    return Verdict(elsewhere == 0 and ours.error <= allowed, found.error, found.scale, rule)


def _without_overflow(actual: torch.Tensor, expected: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """PyTorch's result; where it is NaN or infinite, the wider computation's if that is finite and fits the dtype.

    An infinity of the wider computation is taken where the engine gives it, too: gelu(inf) is NaN in PyTorch's
    vectorised float32 and inf in float64.
    """
    fits = reference.isfinite() & (reference.abs() <= torch.finfo(expected.dtype).max)
    fits |= reference.isinf() & (actual == reference)
    return torch.where(~expected.isfinite() & fits, reference.to(expected.dtype), expected)


def _judge_integers(actual, expected, found: Difference, others, is_choice: Callable[[], bool]) -> Verdict:
    """Integers and booleans must be equal, unless a rounding changes half as many of PyTorch's (near ties).

    Those that are no choice may then be off by FAR times what a rounding changes one of PyTorch's by.
    """
    wrong = actual != expected
    for other in others:
        if wrong.any() and (theirs := other()) is not None and theirs.shape == expected.shape:
            theirs = theirs.to(expected.dtype)
            turned = theirs != expected
            if turned.sum() >= wrong.sum() / 2:
                is_far = _apart(actual, expected) > FAR * _apart(theirs, expected).amax()
                wrong = wrong & is_far & (not is_choice())
    count = int(wrong.sum())
    rule = f"{count} of {expected.numel()} elements are others" if count else "as PyTorch but for near ties"
    return Verdict(count == 0, found.error, found.scale, rule)


def _apart(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """How far integers or booleans are from others."""
    return (x.double() - y.double()).abs()


def _wide(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = torch.view_as_real(x).flatten(-2) if x.is_complex() else x
    return x.to("cpu", dtype)


def _name(x: torch.Tensor, precision: torch.dtype) -> str:
    return "the same dtype" if x.dtype == precision else "tf32"


def _kind(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} of shape {tuple(x.shape)}"
