"""The origin of dimensions: whether they count features, or may count tokens, pixels or nodes.

Weights make features: the columns of a product by a constant, the channels of a convolution, the rows of an embedding.
Every other dimension is followed back to a dimension of an input of the function: its last one, or another.
"""

from collections.abc import Callable

from tvm import relax

from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, shape_of, static_shape

FEATURES, LAST, OTHER = "features", "last", "other"  # made by a weight; an input's last dimension; another of an input
CONVOLUTIONS = ("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose", "nn.conv2d_transpose")
REDUCTIONS = ("sum", "max", "min", "mean", "prod", "argmax", "argmin", "median", "std", "variance")


class LengthOrigins:
    """Tells of each dimension of a function's expressions whether it is FEATURES, or an input's LAST or OTHER one."""

    def __init__(self, bindings: Bindings, is_closed: Callable):
        self.bindings = bindings
        self.is_closed = is_closed  # whether nothing that is given at run time is in an expression
        self._known = {}
        self._pending = [*bindings.values.values()]  # in binding order, so that long chains do not recurse deeply

    def of(self, expr, axis: int) -> str:
        """The origin of one dimension of a tensor, counted from its first, or from its last if negative."""
        pending, self._pending = self._pending, []
        for value in pending:
            self._of_all(value)
        return self._of_all(self.bindings.value(expr))[axis]

    def _of_all(self, value) -> tuple[str, ...]:
        if value not in self._known:
            self._known[value] = tuple(self._origin(value, axis) for axis in range(len(static_shape(value) or ())))
        return self._known[value]

    def _origin(self, value, axis) -> str:
        shape, name = static_shape(value), operator(value)
        here = LAST if axis == len(value.ty.shape) - 1 else OTHER
        if self.is_closed(value):
            return FEATURES if here == LAST else OTHER
        if isinstance(value, relax.TupleGetItem):
            value = self.bindings.value(value.tuple_value)
            name = operator(value)
        if not name or shape is None:
            return here
        if name == "matmul":
            return self._of_product(value, axis - len(shape))
        if name in CONVOLUTIONS:
            return FEATURES if axis == str(value.attrs.data_layout).index("C") else OTHER
        if name == "permute_dims":
            return self.of(value.args[0], permutation(value)[axis])
        if name in SAME_ELEMENTS:
            return self._of_reshaped(value.args[0], shape, axis)
        if name == "take":
            return self._of_taken(value, axis)
        if name in REDUCTIONS and not bool(value.attrs.keepdims):
            return self._of_reduced(value, axis, here)
        return self._of_operands(value, axis - len(shape), len(shape), shape[axis], here)

    def _of_product(self, call, axis) -> str:
        a, b = call.args
        if axis < -2 or min(len(a.ty.shape), len(b.ty.shape)) < 2:
            return OTHER
        operand = b if axis == -1 else a
        return FEATURES if self.is_closed(operand) else self.of(operand, axis)

    def _of_reshaped(self, inner, shape, axis) -> str:
        before = static_shape(inner)
        for old, new in () if before is None else merged_and_split(before, shape):
            if axis in new:
                origins = {self.of(inner, i) for i in old}
                return next(iter(origins)) if len(origins) == 1 else OTHER if OTHER in origins else LAST
        return OTHER

    def _of_taken(self, call, axis) -> str:
        table, indices = call.args
        if call.attrs.axis is None:
            return OTHER
        at, rank = int(call.attrs.axis) % len(table.ty.shape), len(indices.ty.shape)
        if at <= axis < at + rank:
            return OTHER
        return FEATURES if self.is_closed(table) else self.of(table, axis if axis < at else axis - rank + 1)

    def _of_reduced(self, call, axis, here) -> str:
        inner = call.args[0]
        gone = reduced(call)
        kept = [i for i in range(_rank(inner)) if i not in gone]
        return self.of(inner, kept[axis]) if axis < len(kept) else here

    def _of_operands(self, call, axis, rank, length, here) -> str:
        """The origin of `axis` in an operand of the same length there, or else in one of as many dimensions."""
        tensors = [
            x
            for x in self.bindings.operands(call)
            if isinstance(x, relax.Expr) and static_shape(x) is not None and -axis <= _rank(x)
        ]
        alike = [x for x in tensors if shape_of(x)[axis] == length] or [x for x in tensors if _rank(x) == rank]
        given = [x for x in alike if not self.is_closed(x)] or alike
        return self.of(given[0], axis) if given else here


def _rank(expr) -> int:
    return len(expr.ty.shape)


def reduced(call: relax.Call) -> list[int]:
    """The dimensions that a reduction is over."""
    rank, axes = _rank(call.args[0]), call.attrs.axis
    if axes is None:
        return [*range(rank)]
    return [int(i) % rank for i in ([axes] if isinstance(axes, int) else axes)]


def merged_and_split(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Which dimensions of a reshape's operand become which of its result: the smallest groups of equal products.

    Dimensions of length 1 are in no group.
    """
    old = [i for i, n in enumerate(before) if n != 1]
    new = [i for i, n in enumerate(after) if n != 1]
    groups = []
    while old and new:
        group = [old.pop(0)], [new.pop(0)]
        m, n = before[group[0][0]], after[group[1][0]]
        while m != n and (old if m < n else new):
            if m < n:
                group[0].append(old.pop(0))
                m *= before[group[0][-1]]
            else:
                group[1].append(new.pop(0))
                n *= after[group[1][-1]]
        groups.append(group)
    return groups
