"""PyTorch references of elementwise steps and norms of rows, which several kinds of problems share.

Callers pass the module `torch` in, because this package does not import it.
"""

from typing import Any

from tir_kernels.fusion.problem import GATE_COLUMNS, RowProblem

# Functions of torch and x.
ACTIVATIONS = {
    "gelu": lambda torch, x: torch.nn.functional.gelu(x),
    "gelu_tanh": lambda torch, x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": lambda torch, x: torch.relu(x),
    "silu": lambda torch, x: torch.nn.functional.silu(x),
    "tanh": lambda torch, x: torch.tanh(x),
    "sigmoid": lambda torch, x: torch.sigmoid(x),
}


def gated(torch: Any, gate: str, x: Any) -> Any:
    """f(gate) * value of a product (m, 2 n) whose columns alternate between the two: (m, n)."""
    first, value = x.view(len(x), -1, 2, GATE_COLUMNS).unbind(2)
    return (ACTIVATIONS[gate](torch, first) * value).reshape(len(x), -1)


def after_source(torch: Any, problem: RowProblem, x: Any, operands: list) -> list:
    """[out] or [out, out_sum]: the steps and the norm, applied to a source x (m, n)."""
    remaining = iter(operands)
    for step in problem.steps:
        if step.value is not None:
            x = x * step.value if step.kind == "scale" else x.clamp(-step.value, step.value)
        elif step.operand is None:
            x = ACTIVATIONS[step.kind](torch, x)
        else:
            other = next(remaining)[..., : problem.n]  # vectors of a product may be longer than its rows
            x = x + other if step.kind == "add" else x * other
    if problem.norm is None:
        return [x]
    weight = next(remaining) if problem.norm.weight else None
    bias = next(remaining) if problem.norm.bias else None
    if problem.norm.kind == "layer_norm":
        out = torch.nn.functional.layer_norm(x, (problem.n,), weight, bias, problem.norm.eps)
    else:
        out = torch.nn.functional.rms_norm(x, (problem.n,), weight, problem.norm.eps)
        out = out if bias is None else out + bias
    return [out, x] if problem.keeps_sum else [out]
