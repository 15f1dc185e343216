"""Kernel templates for LLVM that the tests lower to: plain loops, in the arguments' order of the problem."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

from tvm import te, tirx, topi

from tir_kernels.fusion.problem import GemmProblem, RowProblem


@dataclass(frozen=True)
class Config:
    label: str = "plain loops"


def template(name="loops", refuses=None, us=1.0, workspace=(), is_proposed=True):
    """A template of rows and products; it refuses those for which `refuses(problem)` gives a reason."""

    def unsupported(problem, target):
        if not isinstance(problem, RowProblem):
            return "no rows as they are"
        return refuses(problem) if refuses else None

    def instantiate(problem, config, target):
        extra = [te.placeholder(shape, dtype, f"ws{i}") for i, (shape, dtype) in enumerate(workspace)]
        inputs, outputs = _compute(problem)
        func = te.create_prim_func([*inputs, *extra, *outputs])
        return func.with_attrs({"global_symbol": name, "op_pattern": 8})

    return SimpleNamespace(
        NAME=name,
        TARGET_KIND="llvm",
        IS_PROPOSED=is_proposed,
        unsupported=unsupported,
        configs=lambda problem, target: [Config()],
        instantiate=instantiate,
        predict_us=lambda problem, config, target: us(problem) if callable(us) else us,
        workspace=lambda problem, config: list(workspace),
    )


ACTIVATIONS = {
    "gelu": lambda x: topi.multiply(topi.multiply(x, 0.5), topi.add(topi.erf(topi.multiply(x, math.sqrt(0.5))), 1.0)),
    "relu": topi.nn.relu,
    "silu": lambda x: topi.multiply(x, topi.sigmoid(x)),
    "tanh": topi.tanh,
    "sigmoid": topi.sigmoid,
}


def _compute(problem):
    m, n = problem.m, problem.n
    if isinstance(problem, GemmProblem):
        a, w = te.placeholder((m, problem.k), problem.dtype, "a"), te.placeholder(problem.w_shape, problem.dtype, "w")
        k = te.reduce_axis((0, problem.k), "k")
        index = (lambda j: w[j, k]) if problem.w_layout == "nk" else (lambda j: w[k, j])
        inputs, x = [a, w], te.compute((m, n), lambda i, j: te.sum(a[i, k] * index(j), axis=k), "product")
    else:
        x = te.placeholder((m, n), problem.dtype, "x")
        inputs = [x]
    operands = [te.placeholder(shape, problem.dtype, f"o{i}") for i, shape in enumerate(problem.operand_shapes)]
    rest = iter(operands)
    for step in problem.steps:
        if step.kind == "scale":
            x = topi.multiply(x, tirx.const(step.value, problem.dtype))
        elif step.kind in ("add", "multiply"):
            x = getattr(topi, step.kind)(x, next(rest))
        else:
            x = ACTIVATIONS[step.kind](x)
    outputs = [x]
    if problem.norm is not None:
        weights = list(rest)
        if problem.norm.kind == "layer_norm":
            outputs = [topi.nn.layer_norm(x, *weights, [1], problem.norm.eps)]
        else:
            outputs = [topi.nn.rms_norm(x, *weights, [1], problem.norm.eps)]
        if problem.keeps_sum:
            outputs.append(x)
    return [*inputs, *operands], outputs
