"""The definition of `problem.py` in NumPy: what kernels are compared with."""

import math
from collections.abc import Callable

import numpy as np

from tir_kernels.fusion.problem import GATE_COLUMNS, STATISTICS_COLUMNS, GemmProblem, MlpProblem, Norm, RowProblem, Step

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATION_FORMULAS: dict[str, Callable] = {
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def fusion_reference(problem: RowProblem | MlpProblem, *inputs) -> list[np.ndarray]:
    """[out], [out, out_sum] or [out, statistics] of a problem: float64 (m, n), and (m, n / 64, 2).

    `inputs` are in the order of its arguments, with the shapes of `problem.inputs` and any float dtype.
    """
    if isinstance(problem, MlpProblem):
        count = len(problem.first.inputs)
        (inner,) = fusion_reference(problem.first, *inputs[:count])
        return fusion_reference(problem.second, inner, *inputs[count:])
    source, *rest = (np.asarray(x, np.float64) for x in inputs)
    operands = iter(rest)
    if isinstance(problem, GemmProblem):
        w = next(operands)
        w = w.reshape(problem.matrices, -1, w.shape[1])
        parts = source.reshape(-1, problem.matrices, problem.rows, problem.k)
        source = (parts @ (w.swapaxes(1, 2) if problem.w_layout == "nk" else w)).reshape(problem.m, problem.w_columns)
        if problem.gate is not None:
            source = source + next(operands) if problem.gate_bias else source
            gate, value = (
                source.reshape(problem.m, -1, 2, GATE_COLUMNS).swapaxes(1, 2).reshape(problem.m, 2, -1).swapaxes(0, 1)
            )
            source = ACTIVATION_FORMULAS[problem.gate](gate) * value
        if problem.a_norm is not None:
            mean, scale = mean_and_scale(problem.a_norm, next(operands))
            columns = next(operands) if problem.a_norm.kind == "layer_norm" else np.zeros((2, problem.n))
            source = scale * (source - mean * columns[0]) + columns[1]
    for step in problem.steps:
        source = _apply(step, source, operands)
    if problem.norm is None:
        return [source, row_statistics(source)] if getattr(problem, "statistics", False) else [source]
    out = source
    if problem.norm.kind == "layer_norm":
        out = out - out.mean(axis=1, keepdims=True)
    out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + problem.norm.eps)
    out = out * next(operands) if problem.norm.weight else out
    out = out + next(operands) if problem.norm.bias else out
    return [out, source] if problem.keeps_sum else [out]


def row_statistics(x) -> np.ndarray:
    """The statistics of a float64 matrix (m, n): float64 (m, n / 64, 2), as `problem.py` defines them."""
    parts = x.reshape(x.shape[0], -1, STATISTICS_COLUMNS)
    mean = parts.mean(axis=2)
    return np.stack([mean, ((parts - mean[..., None]) ** 2).sum(axis=2)], axis=2)


def mean_and_scale(norm: Norm, statistics) -> tuple[np.ndarray, np.ndarray]:
    """Two float64 (m, 1): what the norm subtracts from each row, 0 for rms_norm, and the factor that it applies."""
    means, squares = statistics[..., 0], statistics[..., 1]
    mean = means.mean(axis=1, keepdims=True) * (norm.kind == "layer_norm")
    total = squares.sum(axis=1, keepdims=True) + STATISTICS_COLUMNS * ((means - mean) ** 2).sum(axis=1, keepdims=True)
    return mean, 1 / np.sqrt(total / (STATISTICS_COLUMNS * means.shape[1]) + norm.eps)


def _apply(step: Step, x, operands) -> np.ndarray:
    if step.value is not None:
        return x * step.value if step.kind == "scale" else np.clip(x, -step.value, step.value)
    if step.operand is None:
        return ACTIVATION_FORMULAS[step.kind](x)
    other = next(operands)
    if step.norm is not None:
        mean, scale = mean_and_scale(step.norm, next(operands))
        columns = next(operands)
        other = (other - mean) * scale * columns[0] + columns[1]
    other = other[..., : x.shape[1]]  # vectors of a product may be longer than its rows
    return x + other if step.kind == "add" else x * other
