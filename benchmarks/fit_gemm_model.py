"""Fits the time model of the CUDA matrix-product kernels to sweeps, and prints how far its choices are from the best.

fit:   python benchmarks/fit_gemm_model.py            to results/nvidia-h200/gemm_configurations.json
keep:  python benchmarks/fit_gemm_model.py --add SWEEP.json …        rows of `gpu_gemm_sweep.py`, or of
       `gpu_products.py --all-configs`, into that file; with --weight 0.1 they count less, for what is timed one after
       another has an order at the power limit that is not that of what is timed in turns

Clocks make sweeps differ by up to 17 %: fitted are times relative to others of the same sweep and problem, and with
less weight the times themselves.  The regret of a choice is its time over that of the best that was timed beside it.
Coefficients are fitted to all problems, and to each half of them for the regret on the other half.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
from scipy.optimize import least_squares  # noqa: E402

from benchmarks.products.cases import ProductCase
from tir_kernels.cuda.device import H200
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.gemm.sizes.configs import MEASURED  # noqa: E402
from tir_kernels.fusion.gemm.sizes.cost import FITTED, FITTED_CLUSTERS, FITTED_TMA, FITTED_WGMMA, Model, tile_of  # noqa: E402
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry  # noqa: E402
from tir_kernels.fusion.gemm.sizes.waves import may_have_tail  # noqa: E402
from tir_kernels.fusion.problem import GemmProblem, Step  # noqa: E402

ROWS = Path(__file__).parent / "results" / "nvidia-h200" / "gemm_configurations.json"
COMMITTED = {"mma": FITTED, "wgmma": FITTED_WGMMA, "tma": FITTED_TMA, "cluster": FITTED_CLUSTERS}
# Those of mma.sync were fitted to products with norms too, those of clusters before the model knew warps; they stay.
FREE = {
    "wgmma": ("start", "product", "shared", "wait", "copy", "element", "merge", "read", "soft"),
    "tma": ("start", "product", "shared", "wait", "copy", "element", "merge", "read", "soft", "again"),
}
ABSOLUTE = 0.3  # weight of a group's mean error, beside that of the errors within the group
NEAR_BEST = 0.25  # a configuration that is slower than the best by this share weighs 1/e of the best
LEAST_WEIGHT = 0.05
SHARED_LIMIT = 232448  # bytes of a CTA of an H200
SHOWN = 1.03  # regrets of a problem that are printed
PRIOR = 0.02  # weight of a coefficient's logarithm staying where it was
RATE_PRIOR = 0.3  # the same for the rates of tiles, which stay near 1 where little was timed
MOST_EVALUATIONS = 60
OPTIONAL = {"sets": r"(\d+) sets", "splits": r"(\d+) splits", "tail_n": r"then \d+x(\d+)"}  # of a label


def kind_of(config: GemmConfig) -> str:
    if config.tma and config.splits > 1:
        return "cluster"
    return "tma" if config.tma else "wgmma" if config.warpgroup else "mma"


def parse_label(label: str) -> GemmConfig:
    """The configuration that `GemmConfig.label` names."""
    sizes = [int(n) for n in re.match(r"(\d+)x(\d+)x(\d+) (\d+)x(\d+) warps (\d+) stages", label).groups()]
    found = {name: re.search(text, label) for name, text in OPTIONAL.items()}
    config = GemmConfig(*sizes, warpgroup="wgmma" in label, tma="tma" in label)
    return replace(config, **{name: int(number[1]) for name, number in found.items() if number})


def is_proposed(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether a build without logs may choose a configuration."""
    wide = GemmGeometry(problem, replace(config, tail_n=0))
    return config in MEASURED and (not config.tail_n or may_have_tail(wide, config.tail_n, H200, SHARED_LIMIT))


class Group:
    """Configurations of one problem that were timed in one sweep, which counts with a weight."""

    def __init__(self, problem: dict, times: dict[str, float], weight: float = 1.0):
        steps = tuple(Step(**step) for step in problem["steps"])
        self.problem = GemmProblem(**(problem | {"steps": steps}))
        self.label = f"{self.problem.m}×{self.problem.n}×{self.problem.k}"
        self.configs = [parse_label(label) for label in times]
        self.models = [Model(GemmGeometry(self.problem, config), H200) for config in self.configs]
        self.us = np.array(list(times.values()))
        self.weights = weight * np.maximum(np.exp((1 - self.us / self.us.min()) / NEAR_BEST), LEAST_WEIGHT)

    def predicted(self, coefficients) -> np.ndarray:
        return np.array([m.us(coefficients[kind_of(c)]) for m, c in zip(self.models, self.configs)])

    def residuals(self, coefficients) -> np.ndarray:
        """Errors of the logarithm of the time: within the group, then their mean."""
        error = np.log(self.predicted(coefficients) / self.us)
        mean = np.average(error, weights=self.weights)
        return np.append(np.sqrt(self.weights) * (error - mean), ABSOLUTE * mean * np.sqrt(self.weights.sum()))

    def regret(self, coefficients, warpgroup: bool) -> float | None:
        """Time of the model's choice over the best, with or without warpgroups; None where it has none."""
        allowed = np.array([c.warpgroup or not warpgroup for c in self.configs])
        allowed &= np.array([warpgroup or not c.warpgroup for c in self.configs])
        proposed = allowed & np.array([is_proposed(self.problem, c) for c in self.configs])
        if proposed.sum() < 2:
            return None
        chosen = np.argmin(np.where(proposed, self.predicted(coefficients), np.inf))
        return float(self.us[chosen] / self.us[allowed].min())


def fit(groups: list[Group], start: dict) -> dict:
    """Coefficients of each kind of kernel, near those at the `start`, and the rates of TMA's tiles, near 1."""
    names = [(kind, name) for kind, free in FREE.items() for name in free]
    tiles = sorted({tile_of(c) for g in groups for c in g.configs if kind_of(c) == "tma"})
    first = np.log([getattr(start[kind], name) for kind, name in names])

    def coefficients(logarithms):
        values = dict(zip([*names, *tiles], map(float, np.exp(logarithms))))
        found = {kind: replace(start[kind], **{n: values[kind, n] for n in free}) for kind, free in FREE.items()}
        return start | found | {"tma": replace(found["tma"], rates={tile: values[tile] for tile in tiles})}

    def residuals(logarithms):
        given, rates = coefficients(logarithms), logarithms[len(names) :]
        away = PRIOR * (logarithms[: len(names)] - first)
        return np.concatenate([*(g.residuals(given) for g in groups), away, RATE_PRIOR * rates])

    begin = np.append(first, np.zeros(len(tiles)))
    return coefficients(least_squares(residuals, begin, loss="soft_l1", f_scale=0.1, max_nfev=MOST_EVALUATIONS).x)


def proposed_tiles() -> set:
    """Those that defaults come from."""
    return {tile_of(config) for config in MEASURED if kind_of(config) == "tma"}


def regrets(groups: list[Group], coefficients, warpgroup: bool) -> dict[Group, float]:
    found = {g: g.regret(coefficients, warpgroup) for g in groups}
    return {g: x for g, x in found.items() if x is not None}


def describe(what: str, found: dict[Group, float]) -> str:
    worst = max(found, key=found.get)
    mean = np.exp(np.mean(np.log(list(found.values()))))
    return f"{what:<44} {mean - 1:6.1%} in the geometric mean of {len(found)}, {found[worst] - 1:.0%} at {worst.label}"


def keep(paths: list[Path], weight: float = 1.0) -> None:
    """Adds sweeps' rows of products without a norm to `ROWS`, one entry a sweep and problem."""
    more = {"weight": weight} if weight != 1 else {}
    entries = json.loads(ROWS.read_text()) if ROWS.exists() else []
    for path in paths:
        groups = {}
        for problem, times in itertools.chain.from_iterable(map(_times_of, json.loads(path.read_text()))):
            fields = asdict(problem)
            names = ("m", "n", "k", "dtype", "steps", "w_layout") + ("gate",) * (problem.gate is not None)
            key = json.dumps({name: fields[name] for name in names})
            groups.setdefault(key, {}).update(times)
        entries += [
            {"sweep": path.stem, "problem": json.loads(key), "us": times} | more for key, times in groups.items()
        ]
    ROWS.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")


def _times_of(row: dict) -> Iterator[tuple[GemmProblem, dict[str, float]]]:
    """The problem of a row and times by the label of the configuration, where it has some of this template."""
    if row.get("template") == "gemm" and "us" in row:
        yield eval(row["problem"], {"GemmProblem": GemmProblem, "Step": Step}), {row["label"]: round(row["us"], 3)}
    elif "medians_us" in row:
        labels = {name.removeprefix("gemm "): us for name, us in row["medians_us"].items() if name.startswith("gemm ")}
        problem = ProductCase.from_row(row).problem
        if problem.batch == 1:  # entries do not say by how many matrices
            yield problem, labels


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--add", nargs="+", type=Path, help="sweeps whose rows are kept")
    parser.add_argument("--weight", type=float, default=1.0, help="how much they count")
    options = parser.parse_args()
    if options.add:
        keep(options.add, options.weight)
        return
    entries = json.loads(ROWS.read_text())
    groups = [Group(entry["problem"], entry["us"], entry.get("weight", 1.0)) for entry in entries]
    fitted = fit(groups, COMMITTED)
    problems = list(dict.fromkeys(g.label for g in groups))
    halves = [[g for g in groups if problems.index(g.label) % 2 == i] for i in range(2)]
    kind_names = {True: "wgmma", False: "mma.sync"}
    for warpgroup, name in kind_names.items():
        print(describe(f"{name}, committed coefficients", regrets(groups, COMMITTED, warpgroup)))
        print(describe(f"{name}, fitted to all", regrets(groups, fitted, warpgroup)))
    for i in range(2):
        other = fit(halves[1 - i], COMMITTED)
        for warpgroup, name in kind_names.items():
            print(describe(f"{name}, fitted to the other half", regrets(halves[i], other, warpgroup)))
    for kind, free in FREE.items():
        print(kind, " ".join(f"{name}={getattr(fitted[kind], name):.3g}" for name in free))
    print({tile: round(rate, 3) for tile, rate in fitted["tma"].rates.items() if tile in proposed_tiles()})
    for warpgroup in (True, False):
        then, now = (regrets(groups, coefficients, warpgroup) for coefficients in (COMMITTED, fitted))
        for group in then:
            if max(then[group], now[group]) > SHOWN:
                print(f"{group.label:<18} {kind_names[warpgroup]} {then[group]:.2f} {now[group]:.2f}")


if __name__ == "__main__":
    main()
