"""Calls of one operator in one dtype: PyTorch's own samples, and operands of special values for what is elementwise."""

import itertools
import math
import sys
import types
import unittest
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree


def _op_db():
    # PyTorch's test helpers import expecttest, which the samples do not need.
    helper = types.ModuleType("expecttest")
    helper.TestCase = unittest.TestCase
    sys.modules.setdefault("expecttest", helper)
    from torch.testing._internal.common_methods_invocations import op_db

    return op_db


# TVM's tanh on a CPU, which is a part of them, is right to units of 1, not of the result.
LOOSE = dict.fromkeys(("tanh", "nn.functional.tanhshrink", "nn.functional.mish"), 2.0)
# Places far out are reflected many times, with the rounding errors of a place as large as they are.
LOOSE["grid_sampler_2d"] = 64.0


@dataclass(frozen=True)
class Call:
    """`function(*args, **kwargs)`; the tensors in them are the inputs of `CallModule`."""

    function: object
    args: tuple
    kwargs: dict
    elementwise: bool = False  # compared element by element, not by the largest value
    least: float = 0.0  # of the differences that are allowed, in units of 1

    def tensors(self) -> list[torch.Tensor]:
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    def __call__(self, tensors):
        """The tensors of the result, for these instead of the call's own."""
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, torch.Tensor) else x for x in leaves]
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        result = pytree.tree_leaves(self.function(*args, **kwargs))
        return [x for x in result if isinstance(x, torch.Tensor)]

    def __str__(self):
        describe = lambda x: f"{str(x.dtype)[6:]}{list(x.shape)}" if isinstance(x, torch.Tensor) else repr(x)
        args = [str(pytree.tree_map(describe, x)) for x in self.args]
        args += [f"{k}={pytree.tree_map(describe, x)}" for k, x in self.kwargs.items()]
        return f"({', '.join(args)})"


class CallModule(torch.nn.Module):
    """Several calls, their tensors one after another as inputs; returns a tuple of tuples."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def forward(self, *tensors):
        given, results = iter(tensors), []
        for call in self.calls:
            results.append(tuple(call([next(given) for _ in call.tensors()])))
        return tuple(results)


DTYPES = {
    str(dtype)[6:]: dtype
    for dtype in (
        *(torch.float32, torch.float16, torch.bfloat16, torch.float64),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}


def operators():
    """PyTorch's OpInfos by name, several of one name as name, name_2…"""
    named = {}
    for info in _op_db():
        name = info.formatted_name
        while name in named:
            name += "_"
        named[name] = info
    return named


def calls(info, dtype, cap=6):
    """The calls to try of an operator in a dtype: `cap` of PyTorch's samples, spread, and all of special values."""
    kind = type(info).__name__
    least = LOOSE.get(info.name, 0.0)
    elementwise = kind in ("UnaryUfuncInfo", "BinaryUfuncInfo")
    found = []
    if dtype in info.dtypes:
        torch.manual_seed(0)
        try:
            samples = list(itertools.islice(info.sample_inputs("cpu", dtype), 60))
        except Exception:  # one of PyTorch's generators makes none for a single dtype
            samples = []
        for sample in samples[:: math.ceil(len(samples) / cap)] if samples else []:
            # Where a pool's indices are asked for, it is tried without them, too: only so it is converted.
            for kwargs in [sample.kwargs] + [{**sample.kwargs, "return_indices": False}] * (
                "return_indices" in sample.kwargs
            ):
                found.append(Call(info.op, (sample.input, *sample.args), kwargs, elementwise, least))
    special = {"UnaryUfuncInfo": _unary, "BinaryUfuncInfo": _binary, "ReductionOpInfo": _reduction}.get(kind)
    return found + (
        [Call(info.op, *given, elementwise=elementwise, least=least) for given in special(dtype)] if special else []
    )


def special_values(dtype) -> list[torch.Tensor]:
    """Values at which operators go wrong, a tensor for each magnitude."""
    if dtype is torch.bool:
        return [torch.tensor([True, False, True])]
    if not dtype.is_floating_point:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        rows = [[-7, -3, -2, -1, 0, 1, 2, 3, 7, 8], [low, low + 1, high, high - 1, high // 2, high // 3 + 1]]
        if dtype is torch.int64:
            rows += [[2**31, -(2**31) - 1, 2**53 + 1, -(2**53) - 1, 2**40 + 3]]
        return [torch.tensor([x for x in row if low <= x <= high], dtype=dtype) for row in rows]
    inf, nan = math.inf, math.nan
    halves = [-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 1.0, -1.0, 3.0, -7.0, 0.25, 20.5, -20.5]
    huge = torch.finfo(dtype).max / 4
    return [
        torch.tensor(halves, dtype=dtype),
        torch.tensor([nan, inf, -inf, 0.0, -0.0, 1.0, -1.0], dtype=dtype),
        torch.tensor([torch.finfo(dtype).tiny * 4, -1e-4, 1e-4, 3e-4], dtype=dtype),
        torch.tensor([huge, -huge, 1000.0, -1000.0, 100.0, -100.0], dtype=dtype),
    ]


def _unary(dtype):
    return [((x,), {}) for x in special_values(dtype)]


def _binary(dtype):
    """All pairs of values; with Python scalars; with tensors of no dimensions and of other dtypes."""
    values = special_values(dtype)
    pairs = [((a[:, None], b), {}) for a in values for b in (a, values[0])]
    x = values[0]
    scalars = [2, 0.7, -3, True] if dtype is not torch.bool else [2, 0.7, True]
    for scalar in scalars:
        pairs += [((x, scalar), {}), ((scalar, x), {})]
    for other in (torch.float32, torch.int64, torch.int32, torch.uint8, torch.bool, torch.float16):
        y = special_values(other)[0]
        pairs += [((x[:, None], y), {}), ((y[0], x), {}), ((x, y[1]), {})]
    return pairs


def _reduction(dtype):
    values = special_values(dtype)
    rows = [v for v in values if v.numel() > 2]
    if dtype.is_floating_point:
        rows = rows[:-1]  # of huge values the squares overflow in float32, not in the float64 that PyTorch sums in
    if not dtype.is_floating_point:
        return [((rows[0],), {})]
    nan, inf = math.nan, math.inf
    table = torch.tensor(
        [[1.0, nan, inf], [inf, -inf, 1.0], [nan, nan, -inf], [-inf, -inf, -inf], [3.0, 3.0, -0.5], [0.0, -0.0, 0.0]]
    )
    return [((x,), {}) for x in rows] + [((table.to(dtype),), {"dim": 1})]
