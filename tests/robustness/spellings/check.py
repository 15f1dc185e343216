"""Builds a program, runs it, and compares it with PyTorch: in the program's dtype and in float64."""

import tempfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import tvm

import stof_tvm
from stof_tvm.errors import CompileError, StofError, VerificationError
from stof_tvm.running.native_log import without_noise
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.spellings.program import Model, Program
from tests.robustness.spellings.rounding import Overflows, Rounding

VARIANTS = 2  # inputs that an engine is run on
NOISES = 6
MORE_NOISES = 48  # before an element is called wrong: few are enough for most, and rounding seldom hits a boundary
FILLED = (-5e3, -9e7, -9e29)  # scores below are fills, where nothing else is
# Of so many programs one is built as users build it, and also verified by `build`, which must not miss what is right.
# For the others LLVM does not optimise, which takes most of a build: its errors are not what is looked for.
AS_USERS_DO = 8


@dataclass(frozen=True)
class Verdict:
    """`kind`: "right", "rounding" (right within what rounding does to it), "refused", "skipped" (PyTorch does not
    compute it), or one of FAILURES; `cause`: what it has in common with others; `detail`: all about it."""

    kind: str
    cause: str = ""
    detail: str = ""


FAILURES = ("wrong", "error", "crash", "hang")


def check(program: Program, target: str = "llvm") -> Verdict:
    """What becomes of a program; nothing is raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = Model(program)
            inputs = [model.inputs(variant) for variant in range(VARIANTS)]
            expected = [_expected(model, given) for given in inputs]
        except Exception as error:
            return Verdict("skipped", _shortened(error))
        try:
            engine = _built(model, target, _on(target, inputs[0]), program.seed % AS_USERS_DO == 0)
            results = [_run(engine, _on(target, given)) for given in inputs]
        except CompileError as error:
            return Verdict("error", _shortened(error), f"{str(error)[:1000]}\n…\n{str(error)[-1000:]}")
        except StofError as error:
            if not isinstance(error, VerificationError):
                return Verdict("refused", _shortened(error), str(error))
            return _overflows(model, inputs[0]) or Verdict("wrong", _shortened(error), str(error))
        except Exception as error:
            return Verdict("error", _shortened(error), traceback.format_exc()[-3000:])
        kind = "right"
        for given, want, got in zip(inputs, expected, results, strict=True):
            verdict = compare(model, given, want, got)
            if verdict.kind in (*FAILURES, "skipped"):
                return verdict
            kind = verdict.kind if verdict.kind != "right" else kind
        return Verdict(kind)


def _built(model: Model, target: str, inputs, as_users_do: bool):
    """The model's engine; the comparison with PyTorch here is the one that counts."""
    if as_users_do or target != "llvm":
        return stof_tvm.build(model.module, target, inputs, model.mask, tuning_logs=False, verify=as_users_do)
    engine = stof_tvm.build(model.module, QUICK_LLVM, inputs, model.mask, tuning_logs=False, verify=False)
    # Linked: TVM's just-in-time compiler selects instructions at LLVM's usual level, whatever the target says.
    with tempfile.TemporaryDirectory() as folder, without_noise():
        library = Path(folder, "program.so")
        engine._export_library(str(library))
        engine._library = tvm.runtime.load_module(library)
    return engine


@dataclass(frozen=True)
class Expected:
    """Results in the program's dtype and in float64; `others`, with a mask of the user's: float64 by other choices.

    Differences by choice are here, each a reference of its own, and nowhere a tolerance:
    - Keys that the model's fills (-1e4, -1e9, finfo.min) and the user's mask leave out together are none, so that a row
      without others gives 0 as where the user's mask alone empties it, or the fills count as scores: then what the
      user's mask keeps of them has equal weights.
    What a mask leaves out is not read, NaN in it neither: `generate` writes no such values.
    """

    own: list[torch.Tensor]
    exact: list[torch.Tensor]
    others: list[list[torch.Tensor]]


def _expected(model: Model, inputs) -> Expected:
    own = model.masked_run(inputs) if model.mask is not None else model.run(inputs)
    exact = model.reference(inputs)
    if (
        not own
        or any(not isinstance(x, torch.Tensor) for x in own)
        or [x.shape for x in own] != [x.shape for x in exact]
    ):
        raise ValueError("the reference has other results")
    return Expected(own, exact, [model.reference(inputs, f) for f in FILLED] if model.mask is not None else [])


def _on(target: str, tensors):
    return tuple(x.cuda() if target.startswith("cuda") else x.clone() for x in tensors)


def _run(engine, inputs) -> list[torch.Tensor]:
    result = engine(*inputs)
    return [x.cpu() for x in (result if isinstance(result, tuple) else [result])]


def compare(model: Model, inputs, expected: Expected, results) -> Verdict:
    """Right where every element is; "rounding" where only disturbed references reach it."""
    if len(results) != len(expected.own):
        return Verdict("wrong", "number of results", f"{len(results)} instead of {len(expected.own)}")
    kind, noisy = "right", None
    for number, (got, own, exact) in enumerate(zip(results, expected.own, expected.exact)):
        if got.dtype != own.dtype or got.shape != own.shape:
            return Verdict(
                "wrong",
                "shape or dtype",
                f"result {number} is {got.dtype} {tuple(got.shape)}, must be {own.dtype} {tuple(own.shape)}",
            )
        bad = misses(got, own, exact, [])
        for other in expected.others:
            if bad.any():
                bad &= misses(got, own, other[number], [])
        if not bad.any():
            continue
        if noisy is None:
            noisy = _disturbed(model, inputs, range(NOISES))
        bad &= misses(got, own, exact, [run[number] for run in noisy])
        if bad.any() and len(noisy) == NOISES:
            noisy += _disturbed(model, inputs, range(NOISES, MORE_NOISES), 4)
            # Numbers that are 0 or equal in the program's dtype only: 1 - tanh, what underflows.
            noisy += _disturbed(model, inputs, range(MORE_NOISES, MORE_NOISES + MORE_NOISES), 1, own=True)
            noisy += _disturbed(model, inputs, range(2 * MORE_NOISES, 3 * MORE_NOISES), 1, flushed=True)
            bad &= misses(got, own, exact, [run[number] for run in noisy])
        if bad.any():
            return _overflows(model, inputs) or Verdict(
                "wrong", _how(got, own, bad), _table(number, got, own, exact, bad)
            )
        kind = "rounding"
    return Verdict(kind)


def misses(got, own, exact, noisy) -> torch.Tensor:
    """Boolean, of the result's shape: the elements that no reference allows.

    Numbers may be off by 4 times (halves: 2 times) PyTorch's own error in that row, by eps of the row's largest, or
    by 4 times what rounding does to the row.  NaN and infinities must stand where PyTorch's or the reference's do;
    integers and bools equal one.
    """
    if not own.is_floating_point():
        bad = (got != own) & (got != exact.to(own.dtype))
        for run in noisy:
            bad &= got != run.to(own.dtype)
        return bad
    half = own.dtype in (torch.float16, torch.bfloat16)
    eps, smallest = torch.finfo(own.dtype).eps, torch.finfo(own.dtype).tiny
    largest = torch.finfo(own.dtype).max
    wide = [x.double() for x in (got, own, exact, *noisy)]
    got, own, exact = wide[:3]
    exact_here = exact.to(torch.float64)
    row = lambda x: x.amax(-1, keepdim=True) if x.ndim else x
    numbers = torch.where(exact_here.isfinite() & (exact_here.abs() <= largest), exact_here, own)
    zeroed = lambda x: x.nan_to_num(0.0, 0.0, 0.0)
    error = lambda x: torch.where(x.isfinite() & numbers.isfinite(), zeroed(x) - zeroed(numbers), 0.0).abs()
    allowed = (
        (2 if half else 4) * row(error(own))
        + (1 if half else 16) * eps * row(zeroed(numbers).abs())
        + smallest * (1 + half * 1024)
    )
    for run in wide[3:]:
        allowed = torch.maximum(allowed, 4 * row(error(run)) + eps * row(zeroed(numbers).abs()))
    # What overflows in the program's dtype only is infinite or NaN by the order of its sums.
    same = ~got.isfinite() & ~own.isfinite() & exact.isfinite()
    for reference in wide[1:]:
        same |= _class(got) == _class(torch.where(reference.abs() > largest, torch.inf * reference.sign(), reference))
    return ~same | (got.isfinite() & numbers.isfinite() & (error(got) > allowed))


def _class(x: torch.Tensor) -> torch.Tensor:
    """0 a number, 1 and 2 the infinities, 3 NaN."""
    return x.isposinf() + 2 * x.isneginf() + 3 * x.isnan()


def _disturbed(model: Model, inputs, seeds, factor: float = 1, own=False, flushed=False) -> list[list[torch.Tensor]]:
    """References whose operators are off by `factor` eps, in float64 or their `own` dtype; ours may be off by 4."""
    eps = factor * torch.finfo(model.dtype).eps
    run = model.reference if not own else model.run if model.mask is None else model.masked_run
    runs = []
    for seed in seeds:
        with Rounding(eps, seed, flushed):
            runs.append(run(inputs))
    return runs


def _overflows(model: Model, inputs) -> Verdict | None:
    """Skipped where PyTorch's own float64 leaves the range of numbers: what comes of that is a matter of order."""
    with Overflows() as seen:
        model.reference(inputs)
    return Verdict("skipped", f"overflows in {seen.names[0]}") if seen.names else None


def _how(got, own, bad) -> str:
    """A class of wrong results."""
    if not own.is_floating_point():
        return f"{own.dtype} values"
    pairs = {(int(a), int(b)) for a, b in zip(_class(own)[bad].tolist(), _class(got)[bad].tolist())}
    names = ("number", "inf", "-inf", "nan")
    return "values" if pairs == {(0, 0)} else ", ".join(f"{names[b]} for {names[a]}" for a, b in sorted(pairs))


def _table(number: int, got, own, exact, bad) -> str:
    where = bad.nonzero()
    lines = [f"result {number} {tuple(own.shape)}: {len(where)} of {bad.numel()} elements"]
    for place in where[:4].tolist():
        at = tuple(place)
        lines.append(f"  {place}: got {got[at].item()!r}, PyTorch {own[at].item()!r}, float64 {exact[at].item()!r}")
    return "\n".join(lines)


def _shortened(error: BaseException) -> str:
    """The class and message of an error, without what differs from program to program."""
    import re

    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    text = lines[0].partition("}: ")[2] or lines[0]
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\d+|\([^()]*\)", "_", text)
    return f"{type(error).__name__}: {text[:110]}"
