"""Find where the tokens of some attentions can stand in another order: the region of values that are moved with them.

A value is moved along one axis, whose elements are the tokens.  From the operands and results of the attentions the
region grows to operands and readers, through operators that do the same to each token: those that ranks could divide
along this axis without knowing of one another (parallel/rules.py), into one piece.  Sums, means and extrema over the
tokens are the same in any order.  All other operators stay outside and read tokens in the model's own order.  If one of
these lies on a way from the region back to it, the tokens would move back and forth, in the worst case in each layer:
there is no region, and the operator is the reason.
"""

from collections.abc import Callable

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import AttentionCall, match_attention
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import Bindings, operator, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.parallel.placement import NotShardable, Shard
from relax_passes.parallel.rules import PARTIAL, REDUCTIONS, RESULT, slots_of, split_at, tensors_of

LAYOUT = ("permute_dims", "reshape", "expand_dims", "squeeze")  # a move may as well come behind them
RETURNED = "a result of the model"
Axes = dict[int | str, int | None]  # by the number of an operand, or RESULT: the axis along which it is moved


class MixedTokens(Exception):
    """An operator that cannot be in a region; the message is the reason, for the report."""


class Region:
    """The region of some attentions of "main", or MixedTokens.

    Parameters
    ----------
    mod : IRModule
        Its "main" has composites.
    members : list of relax.Var
        The results of the attentions, whose queries and keys are the same tokens.
    is_masked : callable
        Whether the user gave a mask or a rule for the attention at a path, which then must be a member.

    Attributes
    ----------
    axes : dict of relax.Var to int
        The moved values, and along which axis.
    inside : set of relax.Var
        The variables whose operators belong to the region: they read the moved form of what is moved.
    constants : dict of relax.Var to dict of int to int
        For each variable inside, the places of the constants that are moved with the tokens, and their axes.
    """

    def __init__(self, mod, members: list[relax.Var], is_masked: Callable[[str], bool]):
        self.mod, self.members, self.is_masked = mod, set(members), is_masked
        self.bindings = Bindings(mod["main"])
        self.closed = ClosedExpressions(self.bindings).closed_vars
        self.axes: dict[relax.Var, int] = {}
        self.inside: set[relax.Var] = set()
        self.constants: dict[relax.Var, dict] = {}
        self.exits: dict[relax.Var, str] = {}  # what reads moved values and is outside: the reason
        self.pending: list[relax.Var] = []
        self.length = shape_of(self.bindings.values[members[0]].args[0])[2]
        for member in members:
            self._move(member, 2)
        while self.pending:
            self._visit(self.pending.pop())
        self._check()
        self._move_late()

    def _attention(self, var) -> AttentionCall | None:
        return match_attention(self.mod, self.bindings.values.get(var))

    def _move(self, var, axis: int) -> None:
        if var not in self.axes:
            self.axes[var] = axis
            self.pending.append(var)

    def _visit(self, var) -> None:
        value = self.bindings.values.get(var)
        if value is not None and var not in self.inside:
            try:
                self._include(var, RESULT, self.axes[var])
            except MixedTokens as reason:
                if var in self.members:
                    raise reason
        if var in self.bindings.outputs:
            self.exits.setdefault(var, RETURNED)
        for reader in self.bindings.readers[var]:
            for place in self._places(reader, var):
                try:
                    self._include(reader, place, self.axes[var])
                except MixedTokens as reason:
                    self.exits.setdefault(reader, str(reason))

    def _places(self, reader, var) -> list[int]:
        operands = self._operands(self.bindings.values[reader])
        return [number for number, x in enumerate(operands) if x.same_as(var)] or [0]

    def _operands(self, value) -> list:
        if isinstance(value, relax.TupleGetItem):
            return [value.tuple_value]
        return tensors_of(value) if isinstance(value, relax.Call) else [value]

    def _include(self, var, place: int | str, axis: int) -> None:
        """Take a variable's operator into the region, given where one of its places is moved."""
        value = self.bindings.values[var]
        axes = self._axes_of(var, value, place, axis)
        result = axes.pop(RESULT)
        operands: dict[int | str, relax.Expr] = dict(enumerate(self._operands(value)))
        varying = {n: at for n, at in axes.items() if at is not None and self._varies(operands[n])}
        wanted = [(operands[n], at) for n, at in varying.items()]
        if result is not None:
            wanted.append((var, result))
        for x, at in wanted:
            if self.axes.get(x, at) != at:
                raise MixedTokens(f"{_name(value)} reads tokens along two axes")
            if not isinstance(x.ty, relax.TupleType) and shape_of(x)[at] != self.length:
                raise MixedTokens(f"{_name(value)} joins or parts tokens")
        self.inside.add(var)
        constants = self.constants.setdefault(var, {})  # an attention may come again, by its keys
        for n, at in varying.items():
            if isinstance(operands[n], GenericConst) and constants.setdefault(n, at) != at:
                raise MixedTokens(f"{_name(value)} reads tokens along two axes")
        for x, at in wanted:
            if not isinstance(x, GenericConst):
                self._move(x, at)

    def _varies(self, expr) -> bool:
        """Whether an operand has another value when it is moved: not if it is one number everywhere."""
        return self.bindings.scalar(expr) is None

    def _axes_of(self, var, value, place, axis: int) -> Axes:
        if (call := self._attention(var)) is not None:
            return self._axes_of_attention(var, call, place, axis)
        if isinstance(value, relax.TupleGetItem):
            split = self.bindings.call(value.tuple_value, "split")
            if split is None or split_at(split)[0] == axis:
                raise MixedTokens("a tuple's fields are not the same tokens" if split is None else "split parts tokens")
            return {0: axis, RESULT: axis}
        name = operator(value)
        if name == "split" and split_at(value)[0] != axis:
            return {0: axis, RESULT: axis}
        if name in REDUCTIONS and place == 0:
            rank, over = len(shape_of(value.args[0])), value.attrs.axis
            if over is None or axis in {int(n) % rank for n in over}:
                return {0: axis, RESULT: None}
        try:
            slots = slots_of(value, place, Shard(axis, (self.length,)), 1)
        except NotShardable:
            raise MixedTokens(f"{_name(value)} of shape {_shape(var)} does not do the same to each token") from None
        found: Axes = {}
        for slot, shard in slots.items():
            if isinstance(shard, Shard) and shard.sizes != (self.length,):
                raise MixedTokens(f"{_name(value)} of shape {_shape(var)} joins or parts tokens")
            found[slot] = None if shard is None or shard == PARTIAL else shard.axis
        return found

    def _axes_of_attention(self, var, call: AttentionCall, place, axis: int) -> Axes:
        """An attention is the same for queries in any order, and for keys with their values in any order."""
        if var in self.members:
            if axis != 2 or place not in (RESULT, 0, 1, 2):
                raise MixedTokens(f"attention {named(call.site)} reads tokens along another axis")
            if not is_plain(call):
                raise MixedTokens(f"attention {named(call.site)} also has a mask of the model's own")
            return {0: 2, 1: 2, 2: 2, RESULT: 2}
        if self.is_masked(call.site):
            raise MixedTokens(f"attention {named(call.site)} has a mask that wants another order of the same tokens")
        if axis != 2 or call.causal or call.positions is not None:
            raise MixedTokens(f"attention {named(call.site)} depends on the places of tokens")
        of_queries = place in (RESULT, 0)
        for x in (call.mask, call.bias):
            if x is not None and (shape_of(x)[2 if of_queries else 3] != 1 or place not in (RESULT, 0, 1, 2)):
                raise MixedTokens(f"attention {named(call.site)} has a mask or bias for each token")
        # Whether queries or keys are moved does not depend on the other.
        return {0: 2, RESULT: 2} if of_queries else {1: 2, 2: 2, RESULT: None}

    def _check(self) -> None:
        """MixedTokens if tokens leave the region and come back, or if an operator reads them in two ways."""
        for var, reason in self.exits.items():
            if var in self.inside and reason != RETURNED:
                raise MixedTokens(reason)
        for var in self.inside:
            value = self.bindings.values[var]
            if self._attention(var) is not None:
                continue
            axes = None
            for number, x in enumerate(self._operands(value)):
                if isinstance(x, relax.Var) and x in self.axes:
                    axes = axes or self._axes_of(var, value, number, self.axes[x])
            for number, x in enumerate(self._operands(value)):
                at = None if axes is None else axes.get(number)
                if isinstance(x, relax.Var) and self._varies(x) and self.axes.get(x) != at:
                    raise MixedTokens(f"{_name(value)} of shape {_shape(var)} reads tokens in two ways")
        entries = [var for var in self.axes if var not in self.inside]
        for var, reason in self.exits.items():
            if reason != RETURNED:
                again = self.bindings.computed_from([var])
                operands = self.bindings.reads[var]
                # Entries are there in the model's order, too; other moved values would be moved back for this operator.
                moves_back = any(x in self.axes and x in self.inside for x in operands)
                if any(entry in again for entry in entries) or (moves_back and not again.isdisjoint(self.inside)):
                    raise MixedTokens(reason)

    def _move_late(self) -> None:
        """Where one operator that only changes the layout reads what is moved first, its result is moved instead."""
        for var in [var for var in self.axes if var not in self.inside and var not in self.closed]:
            while True:
                readers = self.bindings.readers[var]
                if len(readers) != 1 or readers[0] not in self.inside:
                    break
                if operator(self.bindings.values[readers[0]]) not in LAYOUT or readers[0] not in self.axes:
                    break
                del self.axes[var]
                var = readers[0]
                self.inside.discard(var)


def is_plain(call: AttentionCall) -> bool:
    """Whether nothing but the user's mask says which keys a query attends to."""
    own = call.mask is not None or call.bias is not None or call.positions is not None
    return not (own or call.causal or call.first_row is not None)


def _name(value) -> str:
    return operator(value) or "an operator"


def _shape(var) -> str:
    shape = None if isinstance(var.ty, relax.TupleType) else static_shape(var)
    return str(shape)
