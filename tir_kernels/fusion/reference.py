"""The definition of `problem.py` in NumPy: what kernels are compared with."""

import math

import numpy as np

from tir_kernels.fusion.problem import GemmProblem, MlpProblem, RowProblem, Step

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
    """[out] or [out, out_sum] of a problem, each float64 (m, n).

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
        source = source @ (w.T if problem.w_layout == "nk" else w)
    for step in problem.steps:
        source = _apply(step, source, operands)
    if problem.norm is None:
        return [source]
    out = source
    if problem.norm.kind == "layer_norm":
        out = out - out.mean(axis=1, keepdims=True)
    out = out / np.sqrt((out**2).mean(axis=1, keepdims=True) + problem.norm.eps)
    out = out * next(operands) if problem.norm.weight else out
    out = out + next(operands) if problem.norm.bias else out
    return [out, source] if problem.keeps_sum else [out]


def _apply(step: Step, x, operands) -> np.ndarray:
    if step.kind == "scale":
        return x * step.value
    if step.operand is None:
        return ACTIVATION_FORMULAS[step.kind](x)
    return x + next(operands) if step.kind == "add" else x * next(operands)
