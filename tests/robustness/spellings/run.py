"""Sweeps over programs of a seed: counts what becomes of them, and makes small what fails."""

import collections
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.robustness.spellings import pool
from tests.robustness.spellings.check import FAILURES, Verdict, check
from tests.robustness.spellings.generate import FEATURES, make_program
from tests.robustness.spellings.shrink import SECONDS, shrink


@dataclass
class Failure:
    """A program that fails, how, and `small`: the small program that fails in the same way, and how that does."""

    index: int
    kind: str
    cause: str
    detail: str
    source: str
    features: tuple[str, ...]
    small: str = ""
    small_detail: str = ""

    def text(self) -> str:
        head = [f"program {self.index}: {self.kind}: {self.cause}", self.small_detail or self.detail]
        return "\n".join(["=" * 100, *head, "-" * 100, self.small or self.source])


@dataclass
class Summary:
    """Counts of verdicts, of refusals by message, of features; and failures."""

    counts: collections.Counter = field(default_factory=collections.Counter)
    refusals: collections.Counter = field(default_factory=collections.Counter)
    skips: collections.Counter = field(default_factory=collections.Counter)
    features: collections.Counter = field(default_factory=collections.Counter)
    first: dict[str, int] = field(default_factory=dict)  # of each refusal and skip, the first program seen
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0

    def counted(self) -> dict:
        names = ("counts", "refusals", "skips", "features")
        return {name: dict(getattr(self, name).most_common()) for name in names} | {
            "first": self.first,
            "seconds": round(self.seconds),
        }

    def text(self) -> str:
        lines = ["=" * 100]
        for title, counter in (("refused", self.refusals), ("skipped", self.skips)):
            lines += [f"{title:<8} {n:>6}  {cause} (program {self.first[cause]})" for cause, n in counter.most_common()]
        lines += [", ".join(f"{kind} {count}" for kind, count in self.counts.most_common())]
        lines += [f"{sum(self.counts.values())} programs in {self.seconds:.0f} s, {len(self.failures)} failures"]
        return "\n".join(lines)


@dataclass(frozen=True)
class Checked:
    verdict: Verdict
    features: tuple[str, ...] = ()


def _check_index(seed: int, only: str | None, target: str) -> Callable[[int], Checked]:
    def work(index: int) -> Checked:
        torch.set_num_threads(1)
        program = make_program(seed, index, only)
        return Checked(check(program, target), program.features)

    return work


def sweep(
    seed: int,
    programs: int,
    first: int = 0,
    jobs: int = 1,
    target: str = "llvm",
    only: str | None = None,
    seconds: float = math.inf,
    shrink: int = 1,
    told: Callable[[Failure | None], None] = lambda failure: None,
) -> Summary:
    """Check programs first … first + programs - 1 of a seed, within so many seconds.

    Of the failures with the same cause and features, `shrink` are made small.  `told` hears of each program as it is
    done, and of each failure again when it was made small.
    """
    if only is not None and only not in FEATURES:
        raise SystemExit(f"--only is one of {', '.join(FEATURES)}")
    started, summary, lost = time.monotonic(), Summary(), lambda how: Checked(Verdict(how.partition(":")[0], how))
    within = lambda _: time.monotonic() - started < seconds
    numbers = itertools.takewhile(within, range(first, first + programs))
    for index, checked in pool.run(_check_index(seed, only, target), numbers, jobs, lost):
        verdict, failure = checked.verdict, None
        summary.counts[verdict.kind] += 1
        summary.features.update(checked.features)
        if verdict.kind in FAILURES:
            program = make_program(seed, index, only)
            how = verdict.kind, verdict.cause, verdict.detail
            summary.failures.append(failure := Failure(index, *how, program.source(target), program.features))
        elif verdict.kind in ("refused", "skipped"):
            getattr(summary, "refusals" if verdict.kind == "refused" else "skips")[verdict.cause] += 1
            summary.first.setdefault(verdict.cause, index)
        told(failure)
    summary.failures.sort(key=lambda failure: failure.index)
    some = itertools.takewhile(within, _some_of_each(summary.failures, shrink))
    make_small = _shrink_failure(seed, only, target, started + seconds)
    for failure, (small, detail) in pool.run(make_small, some, jobs, lambda how: ("", ""), 2 * SECONDS):
        failure.small, failure.small_detail = small, detail
        told(failure)
    summary.seconds = time.monotonic() - started
    return summary


def _some_of_each(failures: list[Failure], most: int) -> list[Failure]:
    """So many failures of each cause and features.  A program that ends its process cannot be made small in one."""
    seen: collections.Counter = collections.Counter()
    some = []
    for failure in failures:
        kind = failure.kind, failure.cause, failure.features[-2:]
        seen[kind] += 1
        if seen[kind] <= most and failure.kind in ("wrong", "error"):
            some.append(failure)
    return some


def _shrink_failure(seed: int, only: str | None, target: str, end: float) -> Callable[[Failure], tuple[str, str]]:
    def work(failure: Failure) -> tuple[str, str]:
        torch.set_num_threads(1)
        verdict = Verdict(failure.kind, failure.cause, failure.detail)
        program, verdict = shrink(make_program(seed, failure.index, only), verdict, lambda p: check(p, target), end)
        return program.source(target), verdict.detail

    return work


def one(seed: int, index: int, only: str | None, target: str) -> int:
    """Check one program in this process, and print it."""
    torch.set_num_threads(1)
    program = make_program(seed, index, only)
    print(program.source(target))
    verdict = check(program, target)
    print(f"{verdict.kind}: {verdict.cause}\n{verdict.detail}")
    return 1 if verdict.kind in FAILURES else 0
