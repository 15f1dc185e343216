"""Whether the compiled import of calls gives PyTorch's numbers: calls of one operator share a build."""

import re
import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
import tvm

from stof_tvm.errors import StofError
from stof_tvm.frontend import import_model
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.running import compile_imported
from tests.stof_tvm.frontend.opinfo.samples import Call, CallModule, calls

# The distance of 1 to the next number.
UNIT = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
BATCH = 24
# Whose last result names one of several equal values, in any order.
TIES = ("topk", "kthvalue", "median", "nanmedian", "mode", "sort", "argsort")
# Memory as it is found.
UNDEFINED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
# PyTorch itself ends the process (division by 0), or gives dtypes that its export contradicts.
LEFT_OUT = {("lcm", torch.int64), ("lcm", torch.int32), ("pow", torch.bool), ("__rpow__", torch.bool)}


@dataclass
class Outcome:
    """The outcome of one operator in one dtype: how many calls were right, refused, failed (no build), wrong."""

    counts: Counter = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)  # what was refused, failed or wrong, and how

    def reasons(self) -> list[str]:
        """Why calls were refused, each reason once: the operators without converter, or an error's words."""
        texts = [line.split(": ", 2)[2] for line in self.lines if line.startswith("refused: ")]
        found = set()
        for text in texts:
            names = re.findall(r"(aten\.\w+|prims\.\w+|torchvision\.\w+)", text) if "no converter" in text else []
            words = text.partition("cannot be converted: ")[2] or text
            found.update([f"{name} has no converter" for name in names] or [words])
        return sorted(found)

    def add(self, kind, call, why=""):
        self.counts[kind] += 1
        if why:
            self.lines.append(f"{kind}: {call}: {why}")


def check(info, dtype, cap=6) -> Outcome:
    """Try an operator in a dtype on all its calls; calls that PyTorch refuses or answers at random are left out."""
    outcome, tried = Outcome(), []
    if info.name in UNDEFINED or (info.name, dtype) in LEFT_OUT:
        return outcome
    ties = info.name in TIES
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for call in calls(info, dtype, cap):
            expected = _eager(call)
            if expected is not None:
                tried.append((call, expected))
        for start in range(0, len(tried), BATCH):
            _check_batch(tried[start : start + BATCH], outcome, ties)
    return outcome


def warm_up():
    """What the first build of a process loads and compiles, for processes forked from this one; runs nothing."""
    torch.set_num_threads(1)
    call = Call(torch.add, (torch.ones(2), torch.ones(2)), {})
    tvm.compile(import_model(CallModule([call]), tuple(call.tensors())).mod, target=QUICK_LLVM)


def _eager(call):
    """PyTorch's result, or None.

    None where PyTorch has none, an input has no elements (which is refused) or is changed, and for random results.
    """
    before = call.tensors()
    if any(not x.numel() for x in before):
        return None
    if any(x.layout != torch.strided or x.is_complex() or x.is_quantized for x in before):
        return None
    try:
        inputs = [x.clone() for x in before]
        first, second = call(inputs), call([x.clone() for x in before])
    except Exception:
        return None
    if not first or any(difference(a, b) for a, b in zip(before, inputs)):
        return None
    if any(x.layout != torch.strided or x.is_complex() for x in first):
        return None
    return first if not any(difference(a, b) for a, b in zip(first, second)) else None


def _check_batch(tried, outcome, ties):
    batch = [call for call, _ in tried]
    inputs = [x.clone() for call in batch for x in call.tensors()]
    try:
        results = compile_imported(import_model(CallModule(batch), tuple(inputs)))(*inputs)
    except StofError as error:
        return _halve(tried, outcome, ties, "refused", error)
    except Exception as error:
        return _halve(tried, outcome, ties, "failed", error)
    for (call, expected), got in zip(tried, results):
        wrong = [
            text
            for a, b in zip(*(_without_ties(call, x) if ties else x for x in (got, expected)))
            if (text := difference(a, b, call.elementwise, call.least))
        ]
        if wrong and not _is_nearer(call, got, expected):
            outcome.add("wrong", call, wrong[0])
        else:
            outcome.add("right", call, "")


def _is_nearer(call, got, expected) -> bool:
    """Whether no half or float32 is further from PyTorch's float64 result than PyTorch's own is, but for rounding."""
    if any(x.dtype not in UNIT or x.dtype == torch.float64 for x in expected):
        return False
    try:
        exact = call([x.double() if x.is_floating_point() else x.clone() for x in call.tensors()])
    except Exception:
        return False
    pairs = list(zip(got, expected, exact))
    if any(a.shape != b.shape or a.dtype != b.dtype or c.dtype != torch.float64 for a, b, c in pairs):
        return False
    own = [((b.double() - c).abs(), 16 * UNIT[b.dtype] * c.abs().amax()) for _, b, c in pairs]
    return all(((a.double() - c).abs() <= error + bound).all() for (a, _, c), (error, bound) in zip(pairs, own))


def _without_ties(call, results):
    """The values only; where there are indices only, the values of one dimension that they name."""
    if len(results) > 1:
        return results[:1]
    (x,) = call.tensors()
    return [x[results[0]]] if x.dim() == 1 else results


def _halve(tried, outcome, ties, kind, error):
    if len(tried) == 1:
        lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
        why = lines[0] if kind == "refused" else f"{type(error).__name__}: {lines[-1]}"
        return outcome.add(kind, tried[0][0], why[:300])
    middle = len(tried) // 2
    _check_batch(tried[:middle], outcome, ties)
    _check_batch(tried[middle:], outcome, ties)


def difference(got, want, elementwise=False, least=0.0) -> str:
    """Where two tensors differ, "" where they agree: exactly for integers, infinities and NaN, else by rounding."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if not want.dtype.is_floating_point:
        wrong = got != want
    else:
        unit, a, b = UNIT[want.dtype], got.double(), want.double()
        finite = b.isfinite()
        scale = b[finite].abs().max() if finite.any() else torch.tensor(0.0)
        bound = 16 * unit * b.abs() + unit * scale.clamp(max=1.0) if elementwise else 16 * unit * scale
        bound = bound.clamp(min=least * unit)
        close = (a - b).abs() <= bound + 0 * b
        exact = (a == b) | (a.isnan() & b.isnan())
        wrong = ~torch.where(finite, close, exact)
    if not wrong.any():
        return ""
    place = wrong.nonzero()[0].tolist()
    return f"{int(wrong.sum())} of {wrong.numel()}, at {place} {got[tuple(place)]} instead of {want[tuple(place)]}"
