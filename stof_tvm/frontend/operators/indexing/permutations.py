"""Writing at the positions that a sort gave: each is written once, so all writes may happen at the same time.

inverse = torch.empty_like(order);  inverse[order] = torch.arange(n)        puts sorted rows back, as experts do
"""

import operator

import torch
from tvm import relax

from stof_tvm.frontend.operators.indexing.reading import reshaped, sizes
from tir_kernels.scatter import scatter_permuted

SORTS = ("aten.sort.default", "aten.sort.stable", "aten.argsort.default", "aten.argsort.stable")
SAME = ("aten.alias.default", "aten.clone.default", "aten.detach.default", "aten.contiguous.default")


def is_permutation(node, n: int) -> bool:
    """Whether the values of an FX node are each of 0 … n - 1 once, in any order: the places that a sort of n gave."""
    while isinstance(node, torch.fx.Node) and str(node.target) in SAME:
        node = node.args[0]
    if not isinstance(node, torch.fx.Node) or tuple(node.meta["val"].shape) != (n,):
        return False
    if node.target is operator.getitem:
        node, place = node.args
        return bool(place == 1) and str(node.target) in SORTS[:2]
    return str(node.target) in SORTS[2:]


def write_permuted(context, x, index, source):
    """`x` (n, …) with x[index[i]] = source[i], where index (n,) has every position once; nothing of x is left."""
    n = sizes(x)[0]
    rows = reshaped(context, source, [n, -1])
    function = scatter_permuted(n, sizes(rows)[1], str(x.ty.dtype), str(index.ty.dtype))
    name = context.builder.add_func(function, "scatter_permuted")
    written = context.emit(relax.call_tir(name, [index, rows], relax.TensorType(sizes(rows), x.ty.dtype)))
    return reshaped(context, written, sizes(x))
