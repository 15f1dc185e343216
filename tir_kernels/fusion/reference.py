"""The definition of `problem.py` in NumPy: what kernels are compared with."""

import math

import numpy as np

from tir_kernels.fusion.problem import MOMENT_COLUMNS, GemmProblem, MlpProblem, RowProblem, Step

_erf = np.vectorize(math.erf, otypes=[np.float64])

ACTIVATION_FORMULAS = {
    "gelu": lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


def fusion_reference(problem: RowProblem | MlpProblem, *inputs) -> list[np.ndarray]:
    """[out], [out, out_sum] or [out, out_moments] of a problem, each float64.

    `inputs` are in the order of its arguments, with the shapes of `problem.inputs` and any float dtype.
    """
    if isinstance(problem, MlpProblem):
        count = len(problem.first.inputs)
        (inner,) = fusion_reference(problem.first, *inputs[:count])
        return fusion_reference(problem.second, inner, *inputs[count:])
    source, *rest = (np.asarray(x, np.float64) for x in inputs)
    moments = rest.pop() if problem.moments_step is not None else None
    operands = iter(rest)
    if isinstance(problem, GemmProblem):
        w = next(operands)
        source = source @ (w.T if problem.w_layout == "nk" else w)
    for step in problem.steps:
        source = _apply(step, source, operands, moments)
    if problem.norm is None:
        given = problem.gives_moments if isinstance(problem, GemmProblem) else ""
        return [source, row_moments(source, given)] if given else [source]
    out = source
    if problem.norm.kind == "layer_norm":
        out = out - out.mean(axis=1, keepdims=True)
    out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + problem.norm.eps)
    out = out * next(operands) if problem.norm.weight else out
    out = out + next(operands) if problem.norm.bias else out
    return [out, source] if problem.keeps_sum else [out]


def row_moments(x, norm: str) -> np.ndarray:
    """(m, n / 64, 2) of x (m, n): the mean of every 64 columns, 0 for "rms_norm", and the squared differences' sum."""
    parts = x.reshape(len(x), -1, MOMENT_COLUMNS)
    mean = parts.mean(axis=2) if norm == "layer_norm" else np.zeros(parts.shape[:2])
    return np.stack([mean, ((parts - mean[..., None]) ** 2).sum(axis=2)], axis=2)


def _mean_and_scale(moments, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """Of each row the mean and 1 / sqrt(variance + eps), both (m, 1)."""
    mean = moments[..., 0].mean(axis=1, keepdims=True)
    squares = moments[..., 1] + MOMENT_COLUMNS * (moments[..., 0] - mean) ** 2
    variance = squares.sum(axis=1, keepdims=True) / (MOMENT_COLUMNS * moments.shape[1])
    return mean, 1 / np.sqrt(variance + eps)


def _apply(step: Step, x, operands, moments) -> np.ndarray:
    if step.operand == "moments":
        return x * _mean_and_scale(moments, step.value)[1]
    if step.operand == "normalized":
        mean, scale = _mean_and_scale(moments, step.value)
        return x + (next(operands) - mean) * scale * next(operands)
    if step.kind == "scale":
        return x * step.value
    if step.operand is None:
        return ACTIVATION_FORMULAS[step.kind](x)
    return x + next(operands) if step.kind == "add" else x * next(operands)
