"""Which of a template's configurations are fast: the analytical model, corrected by what was measured.

    log(us) = log(predicted us) + offset of the task + f(decisions, sizes)

f is XGBoost's, over all tasks together: what one product's records say about tiles holds for the next.  Without records
the analytical model ranks by itself.
"""

import math
import time

import numpy as np
import xgboost

from stof_tvm.tuning.task import Task
from tir_kernels.tuning.template_space import TemplateSpace, values_of

MIN_RECORDS = 12
PARAMETERS = {"max_depth": 5, "eta": 0.2, "lambda": 1.0, "min_child_weight": 0.5, "objective": "reg:squarederror"}
ROUNDS = 40
SIZES = ("m", "n", "k", "batch", "length", "heads", "q_len", "kv_len", "q_heads", "head_dim")


class CostModel:
    """Learns from every outcome; predicts microseconds.

    `seconds` is what it took so far.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.columns = {}  # name of a feature -> its number
        self.rows = []  # (key of the task, features, logarithm of measured over predicted)
        self.trained_on = 0
        self.booster = None
        self.seconds = 0.0

    def learn(self, task: Task, space: TemplateSpace, config, us: float) -> None:
        """Take in a measured time."""
        self.rows.append((task.key, _features(task, space, config), math.log(us / task.predict(space, config))))

    def predict(self, task: Task, candidates: list[tuple[TemplateSpace, object]]) -> list[float]:
        """Microseconds of each candidate, comparable among those of one task."""
        started = time.perf_counter()
        analytical = [task.predict(space, config) for space, config in candidates]
        self._train()
        if self.booster is not None and candidates:
            features = self._matrix([_features(task, space, config) for space, config in candidates])
            residuals = self.booster.predict(xgboost.DMatrix(features))
            analytical = [us * math.exp(residual) for us, residual in zip(analytical, residuals)]
        self.seconds += time.perf_counter() - started
        return analytical

    def _train(self) -> None:
        if len(self.rows) < MIN_RECORDS or len(self.rows) == self.trained_on:
            return
        self.trained_on = len(self.rows)
        offsets = {}
        for key, _, residual in self.rows:
            offsets.setdefault(key, []).append(residual)
        offsets = {key: float(np.median(found)) for key, found in offsets.items()}
        labels = [residual - offsets[key] for key, _, residual in self.rows]
        for name in (name for _, features, _ in self.rows for name in features):
            self.columns.setdefault(name, len(self.columns))
        features = self._matrix([features for _, features, _ in self.rows])
        parameters = {**PARAMETERS, "seed": self.seed, "nthread": 4, "verbosity": 0}
        self.booster = xgboost.train(parameters, xgboost.DMatrix(features, labels), ROUNDS)

    def _matrix(self, rows: list[dict[str, float]]) -> np.ndarray:
        """Rows of features; NaN, which XGBoost takes as missing, where a template has no such field."""
        matrix = np.full((len(rows), len(self.columns)), np.nan, np.float32)
        for i, row in enumerate(rows):
            for name, value in row.items():
                if name in self.columns:
                    matrix[i, self.columns[name]] = value
        return matrix


def _features(task: Task, space: TemplateSpace, config) -> dict[str, float]:
    """Logarithms of the decisions and of the problem's sizes, and which template."""
    features = {space.name: 1.0}
    for name, value in values_of(config).items():
        features[f"{space.name} {name}"] = math.log2(1 + value)
    for name in SIZES:
        if hasattr(task.problem, name):
            features[name] = math.log2(1 + getattr(task.problem, name))
    features["predicted"] = math.log2(task.predict(space, config))
    return features
