"""PyTorch's product of a case: cuBLAS, with the bias in its own epilogue where there is one."""

from collections.abc import Callable, Sequence

import torch

from benchmarks.products.cases import ProductCase
from benchmarks.products.results import ALONE, CUBLAS


def systems_for(case: ProductCase) -> tuple[str, ...]:
    return (CUBLAS, ALONE) if case.bias else (CUBLAS,)


def call_of(system: str, case: ProductCase, inputs: Sequence[torch.Tensor]) -> Callable[[], torch.Tensor]:
    """A function without arguments that computes the case; `ALONE` leaves the bias out.

    Matrices that several parts share are repeated before, where cuBLAS reads one a part.
    """
    a, w, *rest = inputs
    bias = rest[0][: case.n] if rest and system == CUBLAS else None
    if case.batch == 1:
        if case.w_layout == "nk":
            return lambda: torch.nn.functional.linear(a, w, bias)
        return (lambda: a @ w) if bias is None else (lambda: torch.addmm(bias, a, w))
    parts, matrices = a.view(case.batch, -1, case.k), w.view(case.matrices, -1, w.shape[1])
    each = matrices.repeat(case.batch // case.matrices, 1, 1)
    each = each.mT if case.w_layout == "nk" else each
    return (lambda: parts @ each) if bias is None else (lambda: torch.baddbmm(bias, parts, each))
