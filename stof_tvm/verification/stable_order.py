"""Sorting that keeps the order of equal numbers, as an engine does; PyTorch leaves their order open."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class StableOrder(TorchDispatchMode):
    """sort, argsort, topk and kthvalue by a stable sort: of equal numbers the first comes first."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return STABLE.get(func, func)(*args, **(kwargs or {}))


def _sort(x, dim=-1, descending=False):
    return aten.sort.stable(x, stable=True, dim=dim, descending=descending)


def _topk(x, k, dim=-1, largest=True, sorted=True):
    if not x.dim():
        return aten.topk.default(x, k, dim, largest, sorted)
    values, indices = _sort(x, dim, largest)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _kthvalue(x, k, dim=-1, keepdim=False):
    if not x.dim():
        return aten.kthvalue.default(x, k, dim, keepdim)
    values, indices = _sort(x, dim)
    kth = values.narrow(dim, k - 1, 1), indices.narrow(dim, k - 1, 1)
    return kth if keepdim else tuple(one.squeeze(dim) for one in kth)


STABLE = {aten.sort.default: _sort, aten.topk.default: _topk, aten.kthvalue.default: _kthvalue}
