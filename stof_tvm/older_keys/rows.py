"""Which inputs the rows of a tensor are made of, and where older rows and new ones are put together.

The output of an attention has the rows of its queries: what these are compared with is not counted.  Neither is what
only chooses rows, such as an index into a tensor of inputs.
"""

from typing import NamedTuple

from tvm import relax

from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, operator, permutation, static_shape
from tir_kernels.scatter import scatter_arguments

Inputs = frozenset[relax.Var]
NONE: Inputs = frozenset()


class Join(NamedTuple):
    """Tensors that are put together along an axis: `parts` behind one another from row 0 on, or among one another.

    With `is_in_order` False parts are written over rows of others.
    """

    parts: list[relax.Expr]
    is_in_order: bool


class Rows:
    """The inputs that the rows of each variable of `mod["main"]` come from; weights are none."""

    def __init__(self, mod):
        main = mod["main"]
        self.mod, self.bindings = mod, Bindings(main)
        self.known: dict[relax.Var, Inputs] = {
            x: NONE if x in self.bindings.weights or _is_choice(x) else frozenset([x]) for x in main.params
        }
        for var, value in self.bindings.values.items():  # each after what it is computed from
            self.known[var] = self._of_value(value)

    def of(self, expr) -> Inputs:
        """The inputs that the rows of an expression come from."""
        variables = [expr] if isinstance(expr, relax.Var) else relax.analysis.free_vars(expr)
        return frozenset().union(*(self.known.get(x, NONE) for x in variables))

    def _of_value(self, value) -> Inputs:
        if _is_choice(value):
            return NONE
        if (call := match_attention(self.mod, value)) is not None:
            return self.of(call.q)
        name = operator(value)
        if name == "where":
            return self.of(value.args[1]) | self.of(value.args[2])
        if name == "take":  # of a table of weights, such as an embedding, an index is all there is
            return self.of(value.args[0]) or self.of(value.args[1])
        if (written := self._scattered(value)) is not None:
            return self.of(written[0]) | self.of(written[1])
        return self.of(value)

    def _scattered(self, value) -> tuple[relax.Expr, relax.Expr] | None:
        """(what is written into, what is written) if a value is a scatter."""
        if operator(value) != "call_tir" or scatter_arguments(self.mod[value.args[0]]) is None:
            return None
        source, _, updates = self.bindings.value(value.args[1]).fields
        return source, updates

    def joins(self, expr, axis: int, but: Inputs) -> list[Join]:
        """Where the rows of a tensor, along `axis`, are put together of several.

        What comes from no other inputs than those in `but` is not looked into.  Where views hide the axis, a
        concatenation to as many rows as the tensor has counts.
        """
        shape = static_shape(expr)
        length = None if shape is None else shape[axis]
        found: list[Join] = []
        pending: list[tuple[relax.Expr, int | None]] = [(expr, axis)]
        seen = set()
        while pending:
            here, along = pending.pop()
            if not isinstance(here, relax.Var) or (here, along) in seen or self.of(here) <= but:
                continue
            seen.add((here, along))
            value = self.bindings.value(here)
            parts, is_in_order, places = self._step(value, along, length)
            if parts:
                found.append(Join(parts, is_in_order))
            pending += zip((*parts, *places), (along,) * len(parts) + tuple(places.values()))
        return found

    def _step(self, value, axis: int | None, length: int | None):
        """(parts, whether they follow one another, other operands with the axis that `axis` is there) of a value."""
        if isinstance(value, relax.TupleGetItem):
            return [], True, self._places(self.bindings.value(value.tuple_value), axis)
        name = operator(value)
        if name == "concat":
            parts = list(self.bindings.operands(value))
            along = int(value.attrs.axis) % len(value.ty.shape)
            shape = static_shape(value)
            is_here = along == axis if axis is not None else shape is not None and shape[along] == length
            return (parts, True, {}) if is_here else ([], True, dict.fromkeys(parts, axis))
        if name == "where":
            return [value.args[1], value.args[2]], False, {}
        if (written := self._scattered(value)) is not None:
            return [*written], False, {}
        if name == "add" and axis is not None:  # each has as many rows as both: one has zeros where the other has rows
            terms = [x for x, place in self._places(value, axis).items() if _rows_at(x, place) == _rows_at(value, axis)]
            if len(terms) == 2:
                return terms, False, {}
        return [], True, self._places(value, axis)

    def _places(self, value, axis: int | None) -> dict[relax.Expr, int | None]:
        """The operands of a call, each with the axis that has the same rows as `axis`; None where that is not known."""
        if not isinstance(value, relax.Call):
            return {}
        if (call := match_attention(self.mod, value)) is not None:
            return {call.q: axis if axis == 2 else None}
        operands = [x for x in self.bindings.operands(value) if isinstance(x, relax.Var)]
        if operator(value) == "take":
            operands = operands[:1] if self.of(operands[0]) else operands
        return {x: _place(value, x, axis) for x in operands}


def _is_choice(expr) -> bool:
    """Whether an expression is a boolean tensor, which says where rows go and is none."""
    return getattr(getattr(expr, "ty", None), "dtype", None) == "bool"


def _rows_at(expr, axis: int | None) -> int | None:
    shape = static_shape(expr)
    return None if shape is None or axis is None else shape[axis]


def _place(value: relax.Call, operand: relax.Expr, axis: int | None) -> int | None:
    """The axis of an operand that `axis` of the call's result comes from."""
    before, after = static_shape(operand), static_shape(value)
    if axis is None or before is None:
        return None
    name = operator(value)
    if name == "permute_dims":
        return permutation(value)[axis]
    if after is None:  # a split
        return axis
    if name in SAME_ELEMENTS:
        inner = _product(after[axis + 1 :])
        return next((i for i, n in enumerate(before) if n == after[axis] and _product(before[i + 1 :]) == inner), None)
    place = axis - (len(after) - len(before))
    return place if place >= 0 else None


def _product(lengths) -> int:
    product = 1
    for n in lengths:
        product *= n
    return product
