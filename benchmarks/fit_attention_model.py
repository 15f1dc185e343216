"""Fits the time model of the CUDA kernels that walk blocks to a sweep, and prints how far choices are from the best.

usage: python benchmarks/fit_attention_model.py [ROWS.json …]      default: results/nvidia-h200/configurations.json

The regret of a choice is its time over that of the best of all configurations that were measured at the point, whether
the model may choose them or not.  It is printed for the committed coefficients, for a fit to all points, and for fits
to half of the points on the other half, both ways round, for several ways to halve the grid.
"""

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields
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
from tir_kernels.attention.time_model import Coefficients, Work, predict  # noqa: E402
from tir_kernels.attention.warp_specialized import cost as warp_specialized  # noqa: E402
from tir_kernels.attention.warp_specialized.geometry import WarpSpecializedConfig  # noqa: E402
from tir_kernels.cuda.device import H200  # noqa: E402
from tir_kernels.masks.block_counts import FINEST, FineMask  # noqa: E402

ROWS = Path(__file__).parent / "results" / "nvidia-h200" / "configurations.json"
NEAR_BEST = 0.1  # a configuration that is slower than the best by this share weighs 1/e of the best
LEAST_WEIGHT = 0.02
OUTLIER = 0.2  # relative errors above this weigh less than their square
RANDOM_HALVES = 5
LEAST_COEFFICIENT = 1e-9  # stands for 0, whose logarithm a fit cannot start from
# Not fitted, but set by what is chosen: of the kernel with wgmma few configurations near the best split rows, so that a
# fit makes merging free, and rows that others split into few parts are then split into many.
HELD = {"warpgroup": ("merge",)}
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
            problem, key = problem_of(case), (case.mask, case.q_len, case.kv_len)
            if key not in masks:
                masks[key] = FineMask(compile_mask(Pattern(*key).stof_mask(), problem, FINEST))
            for label, median in row["median_us"].items():
                config = config_of(label)
                number.append(cases.index(case))
                configs.append(config)
                work.append(MODELS[kind_of(config)].work_of(problem, config, masks[key], H200))
                us.append(median)
        columns = (np.array(column, float) for column in zip(*work))
        return Sweep(cases, np.array(number), configs, Work(*columns), np.array(us))

    @property
    def slowdown(self) -> np.ndarray:
        """Each time over the best of its case."""
        best = np.full(len(self.cases), np.inf)
        np.minimum.at(best, self.case, self.us)
        return self.us / best[self.case]

    @property
    def kind(self) -> np.ndarray:
        """Position in `KINDS` of each configuration's kind."""
        return np.array([KINDS.index(kind_of(config)) for config in self.configs])

    def fit(self, some: np.ndarray) -> "Fit":
        """The coefficients that are best for some of the cases, by logarithms of times; near the best counts most."""
        kinds = ((self.kind == i, start, HELD.get(KINDS[i], ())) for i, start in enumerate(FITS))
        return Fit(*(self._fit_kind(some, *kind) for kind in kinds))

    def _fit_kind(self, some: np.ndarray, kind: np.ndarray, start: Coefficients, held: tuple[str, ...]) -> Coefficients:
        chosen = some[self.case] & kind
        if not chosen.any():
            return start
        work = Work(*(column[chosen] for column in self.work))
        # Targets without wgmma choose among the others alone: these are against the best of their kind.
        best = np.full(len(self.cases), np.inf)
        compared = kind if start is FITS.warp else np.ones_like(kind)
        np.minimum.at(best, self.case[compared], self.us[compared])
        slowdown = (self.us / best[self.case])[chosen]
        weight = np.sqrt(np.exp(-(slowdown - 1) / NEAR_BEST) + LEAST_WEIGHT)
        measured = np.log(self.us[chosen])

        free = np.array([field.name not in held for field in fields(start)])
        logarithms = np.log(np.maximum(astuple(start), LEAST_COEFFICIENT))

        def coefficients(some: np.ndarray) -> Coefficients:
            every = logarithms.copy()
            every[free] = some
            return Coefficients(*np.exp(every))

        def residuals(some: np.ndarray) -> np.ndarray:
            return (np.log(predict(work, coefficients(some))) - measured) * weight

        fitted = least_squares(residuals, logarithms[free], loss="soft_l1", f_scale=OUTLIER, max_nfev=300)
        return coefficients(fitted.x)

    def predict(self, fit: "Fit") -> np.ndarray:
        return np.choose(self.kind, [predict(self.work, coefficients) for coefficients in fit])

    def choices(self, fit: "Fit", some: np.ndarray) -> dict[Case, tuple[float, int, int]]:
        """(regret, chosen, best) of each of some cases; the last two are positions in the arrays."""
        predicted, slowdown = self.predict(fit), self.slowdown
        candidate = np.array([may_be_chosen(config) for config in self.configs])
        found = {}
        for number in np.flatnonzero(some):
            at = np.flatnonzero(self.case == number)
            chosen = min(at[candidate[at]], key=lambda i: predicted[i])
            found[self.cases[number]] = float(slowdown[chosen]), chosen, at[np.argmin(self.us[at])]
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
        return WarpSpecializedConfig(numbers[0], numbers[1], numbers[3])
    return BlockWiseConfig(*numbers, warpgroup=label.endswith("wgmma"))


def kind_of(config: BlockWiseConfig | WarpSpecializedConfig) -> str:
    """One of `KINDS`."""
    if isinstance(config, WarpSpecializedConfig):
        return "warp_specialized"
    return "warpgroup" if config.warpgroup else "warp"


def may_be_chosen(config: BlockWiseConfig | WarpSpecializedConfig) -> bool:
    """Whether the template predicts the configuration."""
    return isinstance(config, WarpSpecializedConfig) or block_wise.is_candidate(config)


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
