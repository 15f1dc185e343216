"""What the kinds of problems share of their PyTorch: loaded by searches only."""

import torch
import torch.nn.functional as F

from tir_kernels.fusion.problem import RowProblem

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


def normal(shape, dtype: str, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """Normal numbers; zeros for integers, which may be indices into what is not known here."""
    kind = getattr(torch, dtype)
    if not kind.is_floating_point:
        return torch.zeros(shape, dtype=kind, device=device)
    return torch.randn(shape, generator=generator, device=device).to(kind)


def after_source(problem: RowProblem, x: torch.Tensor, operands: list) -> list[torch.Tensor]:
    """The steps and the norm on a source x (m, n)."""
    remaining = iter(operands)
    for step in problem.steps:
        if step.value is not None:
            x = x * step.value if step.kind == "scale" else x.clamp(-step.value, step.value)
        elif step.operand is None:
            x = ACTIVATIONS[step.kind](x)
        else:
            x = x + next(remaining) if step.kind == "add" else x * next(remaining)
    if problem.norm is None:
        return [x]
    weight = next(remaining) if problem.norm.weight else None
    bias = next(remaining) if problem.norm.bias else None
    if problem.norm.kind == "layer_norm":
        out = F.layer_norm(x, (problem.n,), weight, bias, problem.norm.eps)
    else:
        out = F.rms_norm(x, (problem.n,), weight, problem.norm.eps)
        out = out if bias is None else out + bias
    return [out, x] if problem.keeps_sum else [out]
