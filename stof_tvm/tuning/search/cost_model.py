"""Which of a template's configurations are fast: the analytical model, corrected by what was measured.

    log(us) = log(predicted us) + offset of the task + f(decisions, sizes)

f is learned by XGBoost, one for each template from the records of all tasks: what one product's records say about tile
sizes holds for the next product.  Without records the analytical model ranks alone.
"""

import math
from collections import defaultdict

import numpy as np
import xgboost

from stof_tvm.tuning.task import Task
from tir_kernels.problems.registry import kind_of
from tir_kernels.template import config_to_json
from tir_kernels.tuning.template_space import TemplateSpace

MIN_RECORDS = 10  # of a template, to train its booster
PARAMETERS = {"max_depth": 4, "eta": 0.25, "lambda": 1.0, "min_child_weight": 0.5, "objective": "reg:squarederror"}
ROUNDS = 30
# A booster is trained again once its records have grown by half.  In simulated searches this takes as many trials as
# training after each round.
NEWS = 0.5
# Candidates compile on all cores meanwhile: several threads would wait for one another and take ten times as long.
THREADS = 1


class CostModel:
    """Learns from every outcome; predicts microseconds.  Deterministic under a seed."""

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.records = defaultdict(list)  # template -> (key of the task, features, log of measured over predicted)
        self.boosters = {}  # template -> (number of records that it was trained on, booster)
        self.tables = {}  # (key of a task, template) -> features of all configurations
        self.predicted = {}  # (key of a task, template) -> (booster, its prediction for all configurations)

    def learn(self, task: Task, space: TemplateSpace, config, us: float) -> None:
        """Take in a measured time."""
        (features,) = _features(task, space, [config])
        self.records[space.name].append((task.key, features, math.log(us) - features[-1]))

    def predict(self, task: Task, space: TemplateSpace) -> np.ndarray:
        """Microseconds of all configurations of a space, comparable only within one task."""
        key = task.key, space.name
        if key not in self.tables:
            self.tables[key] = _features(task, space, space.configs).astype(np.float32)
        booster = self._booster(space.name)
        if key not in self.predicted or self.predicted[key][0] is not booster:
            logarithms = self.tables[key][:, -1]
            if booster is not None:
                logarithms = logarithms + booster.inplace_predict(self.tables[key])
            self.predicted[key] = booster, np.exp(logarithms)
        return self.predicted[key][1]

    def _booster(self, template: str):
        """The booster of a template, trained again if there are enough new records; None where there are too few."""
        records = self.records[template]
        if len(records) < MIN_RECORDS:
            return None
        count, booster = self.boosters.get(template, (0, None))
        if len(records) - count > NEWS * count:
            of_task = defaultdict(list)
            for key, _, residual in records:
                of_task[key].append(residual)
            offsets = {key: np.median(residuals) for key, residuals in of_task.items()}
            labels = [residual - offsets[key] for key, _, residual in records]
            rows = np.array([features for _, features, _ in records], np.float32)
            data = xgboost.DMatrix(rows, labels, nthread=THREADS)
            parameters = {**PARAMETERS, "seed": self.seed, "nthread": THREADS, "verbosity": 0}
            booster = xgboost.train(parameters, data, ROUNDS)
            self.boosters[template] = len(records), booster
        return booster


def _features(task: Task, space: TemplateSpace, configs) -> np.ndarray:
    """A row for each configuration: log2 of its decisions and of the sizes, then log of the predicted time."""
    assert task.predict is not None  # a task with a space has a prediction
    sizes = kind_of(task.problem).sizes(task.problem).values()
    numbers = np.array([[*config_to_json(config).values(), *sizes] for config in configs], float)
    predicted = np.array([task.predict(space, config) for config in configs])
    return np.column_stack([np.log2(1 + numbers), np.log(predicted)])
