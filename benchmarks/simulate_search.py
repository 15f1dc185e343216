"""How many trials each search needs: a simulation, on a machine without a GPU.

usage: python benchmarks/simulate_search.py [--whole] [--model bert …] [--variants stof,random …] [--seeds 20] …

Nothing is measured here.  The search itself runs as it is (stage 2, of sixteen processes), but a trial's time is what
searches on H200s measured (`results/nvidia-h200/tuning/trials.json`): of BERT's kernels at three lengths every
configuration, which are what `--whole` takes; of others a part.  What was not measured takes the time of the
cost model fitted to all of these times, with a noise of 7 %: the model's error on kernels that it was not fitted
to.  No such time is below the best measured one: searches of 236 to 288 trials a kernel had found nothing better.  So
there the simulation says how soon a search comes to what is known to be good, not whether something better is there.

Printed: the trials, defaults included, until the sum of a model's kernels is within 5, 2 and 1 % of the best possible;
the median over models, lengths and seeds, and in brackets the mean, with the limit where it was not reached.
"""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402

from benchmarks.peers.patterns import shared_pattern  # noqa: E402
from benchmarks.tuning.variants import VARIANTS  # noqa: E402
from stof_tvm import masks  # noqa: E402
from stof_tvm.tuning.measuring.measure import Outcome  # noqa: E402
from stof_tvm.tuning.measuring.quiet import Quiet  # noqa: E402
from stof_tvm.tuning.search.cost_model import CostModel  # noqa: E402
from stof_tvm.tuning.search.searched_model import SearchedModel  # noqa: E402
from stof_tvm.tuning.search.state import Search  # noqa: E402
from stof_tvm.tuning.task import Task, attention_task, choice_of, fusion_task  # noqa: E402
from tir_kernels.attention.problem import AttentionProblem  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402
from tir_kernels.template import config_to_json  # noqa: E402
from tir_kernels.tuning.problem_json import problem_from_json  # noqa: E402

TRIALS = Path(__file__).parent / "results/nvidia-h200/tuning/trials.json"
TARGET = parse_target("cuda -arch=sm_90a")
LEVELS = (1.05, 1.02, 1.01)
NOISE = 0.07  # of the fitted model's logarithm


def main() -> int:
    options = parse_arguments()
    kernels = [Kernel(row) for row in json.loads(TRIALS.read_text())["tasks"]]
    fitted = fitted_model(kernels)
    models = defaultdict(list)
    for kernel in kernels:
        models[kernel.model, kernel.tokens].append(kernel)
    models = {name: parts for name, parts in models.items() if name[0] in options.model}
    if options.whole:
        models = {name: parts for name, parts in models.items() if all(kernel.is_whole for kernel in parts)}
    print("| search | within 5 %: trials | 2 % | 1 % |\n|---|---|---|---|")
    for variant in options.variants:
        found = [
            trials_until(simulated(parts, fitted, variant, seed, options.trials), parts)
            for parts in models.values()
            for seed in range(options.seeds)
        ]
        print(f"| {variant} | {' | '.join(cell(column, options.trials) for column in zip(*found))} |", flush=True)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["bert", "gpt2", "llama", "t5", "vit"]
    parser.add_argument("--model", nargs="+", default=names, choices=names, help="only these")
    variants = ",".join(name for name in VARIANTS if name not in ("no-stage-one", "no-cache"))
    parser.add_argument("--variants", default=variants, type=lambda text: text.split(","))
    parser.add_argument("--whole", action="store_true", help="only where every configuration was measured")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=100, help="of a search (default: %(default)s)")
    return parser.parse_args()


class Kernel:
    """A task of a model, and the times of all its configurations.

    Attributes
    ----------
    runs : int
        How often the model runs it.
    us : dict
        (Template, Config) to microseconds, which `draw` sets.
    """

    def __init__(self, row: dict):
        self.model, self.tokens, self.runs = row["model"], row["tokens"], row["runs"]
        self.task = _task(problem_from_json(row["problem"]), row["mask"])
        self.measured = {}  # place among the configurations -> microseconds
        self.choices = [(space, config) for space in self.task.spaces for config in space.configs]
        for place, (space, config) in enumerate(self.choices):
            for key in _keys(space, config):
                if key in row["us"]:
                    self.measured[place] = row["us"][key]
                    break

    @property
    def best_us(self) -> float:
        return min(self.measured.values())

    @property
    def is_whole(self) -> bool:
        return len(self.measured) == len(self.choices)

    def draw(self, fitted: CostModel, seed: int) -> None:
        """Times under a seed, which decides those that were not measured."""
        times = np.concatenate([fitted.predict(self.task, space) for space in self.task.spaces])
        places = list(self.measured)
        times = times * np.median([self.measured[place] / times[place] for place in places])
        noise = np.random.default_rng([seed, int(self.task.key) % 2**32]).normal(0.0, NOISE, len(times))
        times = np.maximum(times * np.exp(noise), self.best_us)
        times[places] = [self.measured[place] for place in places]
        self.us = {(space.template, config): float(us) for (space, config), us in zip(self.choices, times)}


def _keys(space, config) -> Iterator[str]:
    """What times of a configuration may be kept by: its template and values, without the last that have their defaults
    if these fields were added later."""
    fields = dataclasses.fields(config)
    words = [space.name.replace(" ", "_"), *map(str, config_to_json(config).values())]
    yield " ".join(words)
    for field in reversed(fields):
        if getattr(config, field.name) != field.default:
            return
        words.pop()
        yield " ".join(words)


def _task(problem, mask: str | None) -> Task:
    if not isinstance(problem, AttentionProblem):
        return fusion_task(problem, TARGET)
    bigbird = shared_pattern("bigbird", problem.q_len, problem.kv_len, "cpu").stof_mask()
    return attention_task(problem, bigbird & masks.causal() if mask == "bigbird & causal" else bigbird, TARGET)


def fitted_model(kernels: list[Kernel]) -> CostModel:
    """The project's own cost model, which has seen everything that was measured."""
    model = CostModel()
    for kernel in kernels:
        for place, us in kernel.measured.items():
            model.learn(kernel.task, *kernel.choices[place], us)
    return model


class Replayed:
    """As `Measurer`, of sixteen processes; times are those of `kernels`."""

    gpu, parallel, waited = "simulated", 16, 0.0
    quiet = Quiet(False)

    def __init__(self, kernels: list[Kernel]):
        self.us = {kernel.task.key: kernel.us for kernel in kernels}

    def submit(self, task, schedule) -> Future:
        future = Future()
        future.set_result(Outcome(self.us[task.key][choice_of(task, schedule.trace)]))
        return future

    def wait(self, futures) -> list[Outcome]:
        return [future.result() for future in futures]

    def has(self, task, decisions) -> bool:
        return False

    def records(self, task) -> list:
        return []


class NoLog:
    target = TARGET


def simulated(kernels: list[Kernel], fitted: CostModel, variant: str, seed: int, trials: int) -> list[float]:
    """Microseconds of the model after each trial, infinite until all its kernels have a time."""
    for kernel in kernels:
        kernel.draw(fitted, seed)
    search = Search(NoLog(), Replayed(kernels), VARIANTS[variant], seed, trials)
    tasks = [(kernel.task, kernel.runs) for kernel in kernels]
    search.model = SearchedModel.of(tasks)
    if VARIANTS[variant].defaults:
        search.begin(task for task, _ in tasks)
        search.wait()
    search.tune(tasks, None)
    return [math.inf if trial.model_us is None else trial.model_us for trial in search.trials]


def trials_until(curve: list[float], kernels: list[Kernel]) -> list[int | None]:
    """The number of the trial at which the latency came to each of `LEVELS` times the best; None where it did not."""
    best = sum(kernel.runs * kernel.best_us for kernel in kernels)
    return [next((i for i, us in enumerate(curve, 1) if us <= level * best), None) for level in LEVELS]


def cell(counts: tuple[int | None, ...], limit: int) -> str:
    capped = [limit if count is None else count for count in counts]
    missed = f", {counts.count(None)} of {len(counts)} never" if None in counts else ""
    return f"{statistics.median(capped):g} ({statistics.mean(capped):.1f}{missed})"


if __name__ == "__main__":
    sys.exit(main())
