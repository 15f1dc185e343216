"""Padding of keys and values that is known to be finite, because the inputs of their projections are zeros there.

An attention multiplies values of padding by weights of 0, and 0 times infinity is NaN.  Zeros instead of the keys and
values themselves would be a copy of each.  Zeros in the rows from which they are projected cost nothing: what writes
those rows writes them.  A projection of zeros is its bias, which rotary tables and the like multiply by constants.
"""

import math
import operator

import torch
from torch.fx import Node

from stof_tvm.frontend.padding.dims import Dim, is_padded
from stof_tvm.frontend.padding.rewriter import Rewriter

aten = torch.ops.aten
LARGEST = 1 << 24  # elements of a constant whose values are looked at
MOST = 2.0**15  # beside numbers of this size, sums of products in float32 stay finite; float16 holds twice as much
VIEWS = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.expand.default,
    aten.clone.default,
    aten.alias.default,
    aten.neg.default,
    aten._to_copy.default,
}
CUTS = {aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default}
PRODUCTS = {  # the argument that is projected, the matrix, and what is added
    aten.linear.default: ("input", "weight", "bias"),
    aten.mm.default: ("self", "mat2", None),
    aten.matmul.default: ("self", "other", None),
    aten.addmm.default: ("mat1", "mat2", "self"),
}


def make_finite(rewriter: Rewriter, node: Node) -> bool:
    """Make the padding of a value finite, by zeros where it is projected from; False, and no change, if it may not be.

    Parameters
    ----------
    rewriter : Rewriter
    node : Node
        A floating-point value whose padding may be anything.
    """
    search = _Search(rewriter)
    if not math.isfinite(search.bound(node)):
        return False
    for product, name in search.products:
        _zero_rows(rewriter, product, name)
    return True


class _Search:
    """How large the padding of a value is if the inputs of `products` are zeros there."""

    def __init__(self, rewriter: Rewriter):
        self.rewriter = rewriter
        self.products: list[tuple[Node, str]] = []
        self.known: dict[Node, float] = {}

    def bound(self, node: Node) -> float:
        """The largest magnitude; infinity where it is not known, or above MOST."""
        if node not in self.known:
            found = self._bound(node)
            self.known[node] = found if found <= MOST else math.inf
        return self.known[node]

    def _bound(self, node: Node) -> float:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            return math.inf
        constant = self.rewriter.constant(node, LARGEST)
        if constant is not None:
            return _magnitude(constant)
        if node in self.rewriter.zeroed:
            return 0.0
        if node.name not in self.rewriter.twins:  # a rule's own
            return math.inf
        target = node.target
        if target is operator.getitem:
            return self._cut(node.args[0])  # type: ignore[arg-type]
        if target in VIEWS:
            return self._all([node.args[0]], node, max)
        if target in CUTS:
            return self._cut(node)
        if target in PRODUCTS:
            return self._product(node, *PRODUCTS[target])
        if target is aten.cat.default:
            given = self.rewriter.given(node)
            parts = list(given["tensors"])
            return self._all(parts, node, max) if self._keeps_padding(parts, given["dim"]) else math.inf
        if target in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor):
            return self._elementwise(node)
        return math.inf

    def _cut(self, node: Node) -> float:
        """A slice, or one of the parts of a split, along which there is no padding."""
        if node.target not in CUTS:
            return math.inf
        given = self.rewriter.given(node)
        return self.bound(given["self"]) if self._keeps_padding([given["self"]], given["dim"]) else math.inf

    def _keeps_padding(self, operands: list[Node], axis: int) -> bool:
        return not any(is_padded(self._dims(x)[axis % len(self._dims(x))]) for x in operands)

    def _dims(self, node: Node) -> tuple[Dim, ...]:
        return self.rewriter.value(node).dims

    def _elementwise(self, node: Node) -> float:
        given = self.rewriter.given(node)
        operands = [given["self"], given["other"]]
        if node.target is aten.mul.Tensor:
            return self._all(operands, node, math.prod)
        return self._all(operands, node, sum) if given["alpha"] == 1 else math.inf

    def _all(self, operands: list, node: Node, combined) -> float:
        """The bounds of operands combined, if what is padding in `node` is padding in each that is no constant."""
        bounds = []
        for x in operands:
            if not isinstance(x, Node):
                bounds.append(abs(float(x)) if isinstance(x, int | float) else math.inf)
                continue
            bounds.append(self.bound(x))
            is_constant = self.rewriter.constant(x, LARGEST) is not None
            if not is_constant and _symbols(self._dims(x)) != _symbols(self._dims(node)):
                return math.inf
        return combined(bounds) if all(map(math.isfinite, bounds)) else math.inf

    def _product(self, node: Node, projected: str, matrix: str, added: str | None) -> float:
        """The bias: what a projection of zeros is, if its matrix is finite."""
        given = self.rewriter.given(node)
        weight, bias = given[matrix], given[added] if added is not None else None
        x = self._dims(given[projected])
        if is_padded(x[-1]) or not any(map(is_padded, x[:-1])) or any(map(is_padded, self._dims(weight))):
            return math.inf
        if node.target is aten.addmm.default and not given["alpha"] == given["beta"] == 1:
            return math.inf
        constants = [self.rewriter.constant(x, LARGEST) for x in (weight, bias) if x is not None]
        sizes = [math.inf if x is None else _magnitude(x) for x in constants]
        if not all(map(math.isfinite, sizes)):
            return math.inf
        self.products.append((node, projected))
        return sizes[1] if bias is not None else 0.0


def _symbols(dims: tuple[Dim, ...]) -> list[set]:
    """The symbols of each factor that has padding, outermost first: what views and transposed heads leave as it is."""
    return [factor.free_symbols for dim in dims for factor in dim if not isinstance(factor, int)]


def _magnitude(x: torch.Tensor) -> float:
    """The largest magnitude of a tensor, infinity where one is NaN."""
    largest = x.detach().abs().max().item() if x.numel() else 0.0
    return math.inf if math.isnan(largest) else float(largest)


def _zero_rows(rewriter: Rewriter, product: Node, name: str) -> None:
    """Let a product, and all others that read the same rows, read zeros where those are padding."""
    x = rewriter.given(product)[name]
    value = rewriter.value(x)
    axes = value.padded
    if x in rewriter.zeroed or (len(axes) == 1 and math.isfinite(value.fills.get(axes[0], math.nan))):
        return
    place = x.next if x.op != "placeholder" else next(node for node in rewriter.graph.nodes if node in x.users)
    before = set(rewriter.graph.nodes)
    filled = rewriter.filled(x, axes, 0.0, place)
    rewriter.zeroed.add(filled)
    if any(axis in value.fills for axis in axes):  # other readers may rely on what they know of it
        rewriter.set_argument(product, name, filled)
        return
    x.replace_all_uses_with(filled, delete_user_cb=lambda user: user in before)
