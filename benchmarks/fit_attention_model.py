"""Fits the time model of the CUDA kernels that walk blocks to a sweep, and prints how far choices are from the best.

usage: python benchmarks/fit_attention_model.py [ROWS.json …]      default: results/nvidia-h200/configurations.json

The regret of a choice is its time over that of the best of all configurations that were measured at the point, whether
the model may choose them or not.  It is printed for the committed coefficients, for a fit to all points, and for fits
to half of the points on the other half, both ways round, for several ways to halve the grid.

A fit is made of rounds.  Each fits logarithms of times, robustly; what its choices confuse, the configuration that is
chosen and the one that is best, counts more in the rounds after it, by how much slower the chosen one is.  The round
with the best choices is taken.  Choices are those of all kernels and those of mma.sync alone, which other targets have.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from scipy.optimize import least_squares  # noqa: E402

from benchmarks.gpu_attention_sweep import problem_of  # noqa: E402
from benchmarks.peers.cases import Case  # noqa: E402
from benchmarks.peers.patterns import Pattern  # noqa: E402
from benchmarks.peers.results import read_rows  # noqa: E402
from tir_kernels.attention.block_wise import cost as block_wise  # noqa: E402
from tir_kernels.attention.block_wise.geometry import BlockWiseConfig  # noqa: E402
from tir_kernels.attention.mask_forms import compile_mask  # noqa: E402
from tir_kernels.attention.prediction.time_model import Coefficients, Work, predict  # noqa: E402
from tir_kernels.attention.warp_specialized import cost as warp_specialized  # noqa: E402
from tir_kernels.attention.warp_specialized.geometry import WarpSpecializedConfig  # noqa: E402
from tir_kernels.cuda.device import H200  # noqa: E402
from tir_kernels.masks.block_counts import FINEST, FineMask  # noqa: E402

ROWS = Path(__file__).parent / "results" / "nvidia-h200" / "configurations.json"
NEAR_BEST = 0.1  # a configuration that is slower than the best by this share weighs 1/e of the best
LEAST_WEIGHT = 0.02
OUTLIER = 0.2  # relative errors above this weigh less than their square
RANDOM_HALVES = 5
LEAST_COEFFICIENT, MOST_COEFFICIENT = 1e-9, 1e3  # the former stands for 0, which has no logarithm
ROUNDS = 22
ACCEPTED = 1.05  # times the best time: what is chosen within it is not counted more
PER_ROUND = 12.0  # how much more, for each time that the chosen one is slower than accepted
MOST_WEIGHT = 60.0
WORST = 1.11  # times the best time: of two rounds the one is better whose worst choice is nearer to it
SHOWN = 5


@dataclass(frozen=True)
class Sweep:
    """Times and what the model says about them: arrays over (case, configuration)."""

    cases: list[Case]
    case: np.ndarray  # number of the case
    configs: list[BlockWiseConfig | WarpSpecializedConfig]
    work: Work
    us: np.ndarray

    @staticmethod
    def of(rows: list[dict]) -> "Sweep":
        cases, number, configs, work, us, masks = [], [], [], [], [], {}
        for row in rows:
            case = Case.from_row(row)
            if case not in cases:
                cases.append(case)
            problem = problem_of(case)
            for label, median in row["median_us"].items():
                config = config_of(label)
                key = (case.mask, case.q_len, case.kv_len, config.token_stride)
                if key not in masks:
                    stored = compile_mask(Pattern(*key[:3]).stof_mask(), problem, FINEST, config.token_stride)
                    masks[key] = FineMask(stored)
                number.append(cases.index(case))
                configs.append(config)
                work.append(MODELS[kind_of(config)].work_of(problem, config, masks[key], H200))
                us.append(median)
        columns = (np.array(column, float) for column in zip(*work))
        return Sweep(cases, np.array(number), configs, Work(*columns), np.array(us))

    @property
    def slowdown(self) -> np.ndarray:
        """Each time over the best of its case."""
        return self.slowdown_among(KINDS)

    def slowdown_among(self, kinds: Sequence[str]) -> np.ndarray:
        """Each time over the best of its case that a configuration of some kinds has."""
        best, one = np.full(len(self.cases), np.inf), np.isin(self.kind, [KINDS.index(kind) for kind in kinds])
        np.minimum.at(best, self.case[one], self.us[one])
        return self.us / best[self.case]

    @property
    def kind(self) -> np.ndarray:
        """Position in `KINDS` of each configuration's kind."""
        return np.array([KINDS.index(kind_of(config)) for config in self.configs])

    def fit(self, some: np.ndarray, rounds: int | None = None) -> "Fit":
        """The coefficients that are best for some of the cases; near the best counts most, and what is confused."""
        counts, found, least = np.ones(len(self.us)), FITS, np.inf
        best = found
        for _ in range(ROUNDS if rounds is None else rounds):
            found = Fit(*(self._fit_kind(some, counts, i, start) for i, start in enumerate(found)))
            confused = [c for kinds in (KINDS, KINDS[:1]) for c in self.choices(found, some, kinds).values()]
            slower = np.array([slowdown for slowdown, _, _ in confused])
            loss = np.log(slower).mean() + max(slower[: some.sum()].max() - WORST, 0)
            if loss < least:
                least, best = loss, found
            for slowdown, *pair in confused:
                counts[pair] *= 1 + PER_ROUND * max(slowdown - ACCEPTED, 0)
            counts = np.minimum(counts, MOST_WEIGHT)
        return best

    def _fit_kind(self, some: np.ndarray, counts: np.ndarray, number: int, start: Coefficients) -> Coefficients:
        kind = self.kind == number
        chosen = some[self.case] & kind
        if not chosen.any():
            return start
        work = Work(*(column[chosen] for column in self.work))
        # Targets without wgmma choose among the others alone: these are against the best of their kind.
        slowdown = self.slowdown_among(KINDS[:1] if number == 0 else KINDS)[chosen]
        weight = np.sqrt((np.exp(-(slowdown - 1) / NEAR_BEST) + LEAST_WEIGHT) * counts[chosen])
        measured = np.log(self.us[chosen])

        def residuals(logarithms: np.ndarray) -> np.ndarray:
            return (np.log(predict(work, Coefficients(*np.exp(logarithms)))) - measured) * weight

        logarithms = np.log(np.clip(astuple(start), 1.1 * LEAST_COEFFICIENT, 0.9 * MOST_COEFFICIENT))
        bounds = np.log((LEAST_COEFFICIENT, MOST_COEFFICIENT))
        fitted = least_squares(residuals, logarithms, bounds=bounds, loss="soft_l1", f_scale=OUTLIER, max_nfev=200)
        return Coefficients(*np.exp(fitted.x))

    def predict(self, fit: "Fit") -> np.ndarray:
        return np.choose(self.kind, [predict(self.work, coefficients) for coefficients in fit])

    def choices(
        self, fit: "Fit", some: np.ndarray, kinds: Sequence[str] | None = None
    ) -> dict[Case, tuple[float, int, int]]:
        """(regret, chosen, best) of each of some cases among some kinds, by default all.

        The last two are positions in the arrays.
        """
        kinds = KINDS if kinds is None else kinds
        predicted, slowdown = self.predict(fit), self.slowdown_among(kinds)
        one = np.isin(self.kind, [KINDS.index(kind) for kind in kinds])
        candidate = one & np.array([may_be_chosen(config) for config in self.configs])
        found = {}
        for number in np.flatnonzero(some):
            at = np.flatnonzero((self.case == number) & one)
            chosen = min(at[candidate[at]], key=lambda i: predicted[i])
            found[self.cases[number]] = float(slowdown[chosen]), int(chosen), int(at[np.argmin(self.us[at])])
        return found


class Fit(NamedTuple):
    """Coefficients of the kernels that multiply by mma.sync and by wgmma, and of the warp-specialized one."""

    warp: Coefficients
    warpgroup: Coefficients
    warp_specialized: Coefficients


KINDS = Fit._fields
MODELS = dict(zip(KINDS, (block_wise, block_wise, warp_specialized)))
FITS = Fit(block_wise.FITTED, block_wise.FITTED_WARPGROUP, warp_specialized.FITTED)


def config_of(label: str) -> BlockWiseConfig | WarpSpecializedConfig:
    """The configuration that a label shows."""
    numbers = [int(n) for n in re.findall(r"\d+", label)]
    if "warpgroups" in label:
        block_m, block_n, _, stages, *apart = numbers
        return WarpSpecializedConfig(block_m, block_n, stages, 1, *apart)
    return BlockWiseConfig(*numbers, warpgroup="wgmma" in label)


def kind_of(config: BlockWiseConfig | WarpSpecializedConfig) -> str:
    """One of `KINDS`."""
    if isinstance(config, WarpSpecializedConfig):
        return "warp_specialized"
    return "warpgroup" if config.warpgroup else "warp"


def may_be_chosen(config: BlockWiseConfig | WarpSpecializedConfig) -> bool:
    """Whether the template predicts the configuration."""
    return isinstance(config, WarpSpecializedConfig) or block_wise.is_candidate(replace(config, token_stride=1))


def halves(cases: list[Case]) -> dict[str, np.ndarray]:
    """Ways to cut the grid in two, each a boolean array."""
    shapes = {shape: i for i, shape in enumerate(dict.fromkeys(case.shape for case in cases))}
    masks = {mask: i for i, mask in enumerate(sorted({case.mask for case in cases}))}
    cut = {
        "every second shape": np.array([shapes[case.shape] % 2 == 0 for case in cases]),
        "every second mask": np.array([masks[case.mask] % 2 == 0 for case in cases]),
    }
    for seed in range(RANDOM_HALVES):
        order = np.random.default_rng(seed).permutation(len(cases))
        cut[f"at random, {seed}"] = np.isin(np.arange(len(cases)), order[::2])
    return cut


def describe(name: str, found: dict[Case, tuple[float, int, int]]) -> str:
    regret = np.array([slowdown for slowdown, _, _ in found.values()])
    return f"{name:<42} {np.exp(np.log(regret).mean()) - 1:6.1%} {regret.max() - 1:6.1%}"


def report(sweep: Sweep, show: Callable[[str], None] = print) -> None:
    everything = np.ones(len(sweep.cases), bool)
    show(f"{len(sweep.cases)} points, {len(sweep.us)} times; regret against the best of all configurations")
    show(f"{'':<42} {'mean':>6} {'worst':>6}")
    for config in filter(may_be_chosen, dict.fromkeys(sweep.configs)):
        at = [i for i, other in enumerate(sweep.configs) if other == config]
        if len(at) == len(sweep.cases):
            show(describe(f"always {config.label}", {i: (sweep.slowdown[i], i, i) for i in at}))
    bound = {case: (min(sweep.slowdown[i] for i in _candidates(sweep, n)), 0, 0) for n, case in enumerate(sweep.cases)}
    show(describe("best of the tiles that may be chosen", bound))
    fitted = sweep.fit(everything)
    for name, half in halves(sweep.cases).items():
        for side, held_out in (("fitted to one half", ~half), ("to the other", half)):
            show(describe(f"{name}, {side}", sweep.choices(sweep.fit(~held_out), held_out)))
    show(describe("fitted to all", sweep.choices(fitted, everything)))
    committed = sweep.choices(FITS, everything)
    show(describe("as committed", committed))
    show(describe("as committed, mma.sync alone", sweep.choices(FITS, everything, KINDS[:1])))
    near = sweep.slowdown < 1 + NEAR_BEST
    error = np.log(sweep.predict(FITS) / sweep.us)[near]
    show(f"committed predictions of configurations near the best: {np.sqrt((error**2).mean()):.1%} off (rms)")
    show("\nworst choices, as committed:")
    for case, (slowdown, chosen, best) in sorted(committed.items(), key=lambda item: -item[1][0])[:SHOWN]:
        chosen, best = (sweep.configs[i].label for i in (chosen, best))
        show(f"  {slowdown - 1:6.1%}  {case.label}: {chosen} instead of {best}")
    for kind, coefficients in fitted._asdict().items():
        show(f"\nfitted to all, {kind}:")
        for field in fields(coefficients):
            show(f"    {field.name}={max(getattr(coefficients, field.name), LEAST_COEFFICIENT):.3g},")


def _candidates(sweep: Sweep, number: int) -> list[int]:
    return [i for i in np.flatnonzero(sweep.case == number) if may_be_chosen(sweep.configs[i])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path, default=[ROWS], help="what gpu_attention_sweep.py wrote")
    report(Sweep.of(read_rows(parser.parse_args().rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
