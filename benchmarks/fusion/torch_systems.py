"""PyTorch's ways to compute a case: cuBLAS alone, with compiled elementwise kernels, compiled as a whole, eager."""

import torch
import torch.nn.functional as F

from benchmarks.fusion.cases import LAYER_NORM, FusionCase

PRODUCTS = ("cublas", "cublas-compile", "compile", "eager")
NORMS = ("compile", "eager", "torch-add")
PARTIAL = ("cublas", "torch-add")  # they compute less than the case: bounds, not peers


def systems_for(case: FusionCase) -> tuple[str, ...]:
    return PRODUCTS if case.k else NORMS


def after_product(case: FusionCase):
    """The rest of the sequence, of the last product or source x and the other operands."""
    if case.template == "mlp":
        return lambda x, bias, residual: x + bias + residual
    if case.template == "gemm-gelu":
        return lambda x, bias: F.gelu(x + bias)
    return lambda x, bias, residual, weight, norm_bias: F.layer_norm(
        x + bias + residual, (case.n,), weight, norm_bias, LAYER_NORM.eps
    )


def after_inner(x, bias):
    """What lies between two products."""
    return F.gelu(x + bias)


def two_products(between, rest, a, w, bias, w2, bias2) -> torch.Tensor:
    """An adapter, of what follows its first product and its second."""
    return rest(between(a @ w.T, bias) @ w2.T, bias2, a)


def sequence(case: FusionCase, *inputs: torch.Tensor) -> torch.Tensor:
    """The unfused computation in the inputs' dtype."""
    if case.inner:
        return two_products(after_inner, after_product(case), *inputs)
    if case.k:
        inputs = (inputs[0] @ inputs[1].T, *inputs[2:])
    return after_product(case)(*inputs)


def prepare(system: str, case: FusionCase):
    """A function of the inputs that computes the case; compiled functions compile at their first call."""
    rest = after_product(case)
    if system == "cublas" and case.inner:
        return lambda a, w, bias, w2, bias2: a @ w.T @ w2.T
    if system == "cublas":
        return lambda a, w, *operands: a @ w.T
    if system == "torch-add":
        return lambda x, bias, residual, *norm: x + residual
    if system == "eager":
        return lambda *inputs: sequence(case, *inputs)
    # Shapes are compiled in, as they are for ours; the limit on recompilations would fall back to eager without a word.
    torch._dynamo.reset()
    if system == "cublas-compile":
        compiled = torch.compile(rest, dynamic=False, fullgraph=True)
        if case.inner:
            between = torch.compile(after_inner, dynamic=False, fullgraph=True)
            return lambda *inputs: two_products(between, compiled, *inputs)
        return lambda a, w, *operands: compiled(a @ w.T, *operands)
    # Of a product with gelu, `compile` is cuBLAS and what Inductor makes of the rest.
    return torch.compile(lambda *inputs: sequence(case, *inputs), dynamic=False, fullgraph=True)
