"""Find what the ranks divide: regions of "main" from products by columns, or slices, to products by rows.

A region begins at an attention, whose heads are divided, or at a product by a weight, whose sums are.  From there the
rules carry the division to operands and to readers.  Every reader of a divided value must be able to go on; it ends
where each rank has a term of a sum, which an all-reduce adds up.  An operand that an attention needs divided and that
cannot be, as behind a norm over all heads, is computed whole and sliced.  In the region of a product nothing is sliced
but weights, else the ranks would share no work.  A region that does not come out stays whole, and the reason is told.

A last product, from which only elementwise operators lead to results, such as that to a vocabulary, may keep columns of
large weights, and an all-gather follows: where it gathers little beside what each rank need not read.
"""

import json
import math

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import BUFFERS, SAME_ELEMENTS, STATES, Bindings, dtype_of, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.parallel.placement import NotShardable, Shard
from relax_passes.parallel.rules import (
    ELEMENTWISE,
    GATHERED,
    PARTIAL,
    RESULT,
    Slots,
    attention_slots,
    scatter_slots,
    sliced_at,
    slots_of,
    split_at,
    split_slots,
    tensors_of,
)
from tir_kernels.errors import UnsupportedError
from tir_kernels.scatter import ScatterArguments, scatter_arguments

LEAST_GATHERED = 64 << 20  # bytes of weights: reading half of them takes as long as gathering anything
SHARE_GATHERED = 8  # the inner size is this many times the number of rows, or more
READ_BY_CALLER = "a result of the model is computed from it without a product by a weight"


class Regions:
    """The divided values of "main".  States of the model's own are divided where their new values are.

    Attributes
    ----------
    shards : dict of relax.Var to Shard
        The variables of which a rank computes its part only.
    slots : dict of relax.Var to Slots
        The slots of each call that reads or computes divided values, by the variable that it is bound to.
    sites : dict of str to str
        For each attention that stays whole the reason, "" for the others.
    products : list of (relax.Var, int)
        The products by rows that no attention leads to, and how many products by columns lead to each.
    gathered : list of relax.Var
        The products whose columns are divided and gathered; none without `gathers`.
    """

    def __init__(self, mod, count: int, gathers: bool = False):
        self.mod, self.count = mod, count
        self.bindings = Bindings(mod["main"])
        self.states = _states(mod["main"], self.bindings)
        self.outputs = json.loads(str((mod["main"].attrs or {}).get(STATES, "[0]")))[0]
        self.closed = ClosedExpressions(self.bindings).closed_vars
        self.shards: dict[relax.Var, Shard] = {}
        self.slots: dict[relax.Var, Slots] = {}
        self.sites: dict[str, str] = {}
        self.products: list[tuple[relax.Var, int]] = []
        for var, value in self.bindings.values.items():
            if (call := match_attention(mod, value)) is not None:
                self.sites[call.site] = self._divide(var, is_attention=True) or ""
        for var in self.bindings.values:
            if self._is_by_weight(var) and var not in self.slots:
                before = len(self.slots)
                if self._divide(var, is_attention=False) is None:
                    new = [*self.slots.items()][before:]
                    columns = sum(self._is_by_weight(x) and slots[RESULT] != PARTIAL for x, slots in new)
                    self.products += [(x, columns) for x, slots in new if slots[RESULT] == PARTIAL]

        self.gathered: list[relax.Var] = []
        for var in self.bindings.values if gathers else ():
            if self._is_by_weight(var) and var not in self.slots and self._pays(var) and self._is_last(var):
                if self._divide(var, is_attention=False, seed=self._columns(var)) is None:
                    self.gathered.append(var)

    def scatter(self, value) -> ScatterArguments | None:
        """How the scatter's kernel was made that a value is a call of, or None."""
        return scatter_arguments(self.mod[value.args[0]]) if operator(value) == "call_tir" else None

    def is_weight(self, expr) -> bool:
        """Whether an expression depends on constants only."""
        return isinstance(expr, GenericConst) or expr in self.closed

    def _is_by_weight(self, var) -> bool:
        call = self.bindings.values[var]
        return operator(call) == "matmul" and not self.is_weight(call.args[0]) and self.is_weight(call.args[1])

    def _pays(self, var) -> bool:
        """Whether gathering the columns of a product by a matrix takes less time than reading all of the matrix."""
        shape, weight = shape_of(var), shape_of(self.bindings.values[var].args[1])
        if len(weight) != 2 or len(shape) < 2:
            return False
        nbytes = math.prod(weight) * tvm.DataType(dtype_of(self.bindings.values[var].args[1])).bits // 8
        return nbytes >= LEAST_GATHERED and math.prod(shape[:-1]) * SHARE_GATHERED <= weight[0]

    def _is_last(self, var) -> bool:
        """Whether only elementwise operators and views lead from a variable to results."""
        pending = [var]
        while pending:
            for reader in self.bindings.readers[pending.pop()]:
                value = self.bindings.values[reader]
                if operator(value) in ELEMENTWISE or operator(value) in SAME_ELEMENTS:
                    pending.append(reader)
                elif not isinstance(value, relax.Tuple):
                    return False
        return True

    def _columns(self, var) -> Slots:
        """The slots of a product whose columns are divided and gathered."""
        return {0: None, 1: Shard(1, (shape_of(var)[-1],)), RESULT: GATHERED}

    def _divide(self, var, is_attention: bool, seed: Slots | None = None) -> str | None:
        """Divide the region that an attention or a product is in; the reason where it stays whole."""
        whole: set[relax.Var] = set()
        while True:
            region = _Region(self, whole, may_slice=is_attention)
            try:
                region.grow(var, self._seed(var) if seed is None else seed)
            except _Whole as found:
                whole.add(found.var)
                continue
            except (NotShardable, UnsupportedError) as reason:
                return str(reason)
            self.shards.update(region.shards)
            self.slots.update(region.slots)
            return None

    def _seed(self, var) -> Slots:
        value = self.bindings.values[var]
        if (call := match_attention(self.mod, value)) is not None:
            return attention_slots(call, self.count)
        rank = len(shape_of(value.args[0]))
        size = 0 if rank < 2 else shape_of(value.args[0])[-1]
        if size == 0:
            raise NotShardable("no rule divides a product with a vector")
        return {0: Shard(rank - 1, (size,)), RESULT: PARTIAL}


def _states(function, bindings: Bindings) -> list[tuple[relax.Var, relax.Var]]:
    """(parameter, new value) of each state of the model's own."""
    attrs = function.attrs or {}
    if STATES not in attrs:
        return []
    results = bindings.value(function.body.body)
    buffers = {str(name) for name in attrs.get(BUFFERS, ())}
    pairs = [(function.params[p], results.fields[r]) for p, r in json.loads(str(attrs[STATES]))[1]]
    return [(parameter, new) for parameter, new in pairs if parameter.name in buffers and isinstance(new, relax.Var)]


class _Whole(Exception):
    """A variable that must be computed whole after all."""

    def __init__(self, var: relax.Var):
        super().__init__()
        self.var = var


class _Region:
    """A region while it grows; `whole` are variables to slice instead of dividing what computes them."""

    def __init__(self, regions: Regions, whole: set, may_slice: bool):
        self.known, self.bindings, self.count = regions, regions.bindings, regions.count
        self.whole, self.may_slice = whole, may_slice
        self.shards: dict[relax.Var, Shard] = {}
        self.slots: dict[relax.Var, Slots] = {}
        self.forced: set[relax.Var] = set()  # computed from divided values
        self.pending: list[relax.Var] = []

    def grow(self, var, seed: Slots) -> None:
        """Carry a division to all that it reaches; NotShardable or _Whole where it cannot go on."""
        if seed[RESULT] == PARTIAL:  # of a product by a weight: how its sums are divided follows from its operand
            self._need(tensors_of(self.bindings.values[var])[0], seed[0])
        else:
            self._apply(var, seed, forced=True)
        while self.pending:
            self._visit(self.pending.pop())

    def _visit(self, var) -> None:
        shard = self.shards[var]
        value = self.bindings.values.get(var)
        for parameter, new in self.known.states:  # a state and its new value are divided alike
            for one, other in ((parameter, new), (new, parameter)):
                if one.same_as(var):
                    self._assign(other, shard, forced=True)
        if value is not None and var not in self.slots:
            try:
                self._to_operands(var, value, shard)
            except NotShardable:
                self._give_up(var)
        if var in self.bindings.outputs:
            self._give_up(var, READ_BY_CALLER)
        for reader in self.bindings.readers[var]:
            try:
                self._to_reader(var, shard, reader)
            except NotShardable as reason:
                self._give_up(var, str(reason))

    def _to_operands(self, var, value, shard) -> None:
        if isinstance(value, relax.TupleGetItem):
            self._need(value.tuple_value, self._of_tuple(value, shard))
            return
        if operator(value) == "split":
            self._apply(var, {0: shard, RESULT: shard}, forced=False)
            return
        slots = self._slots(value, RESULT, shard)
        if operator(value) == "strided_slice" and slots[0] != shard:
            slots[0] = self._among_slices(value.args[0], slots[0])
        self._apply(var, slots, forced=False)

    def _to_reader(self, var, shard, reader) -> None:
        value = self.bindings.values[reader]
        if reader in self.bindings.outputs and isinstance(value, relax.Tuple):
            self._check_results(var, value)
        elif isinstance(value, relax.TupleGetItem):
            split = self.bindings.call(var, "split")
            self._assign(reader, split_slots(split, shard, value.index), forced=True)
        elif operator(value) == "split":
            self._apply(reader, {0: shard, RESULT: shard}, forced=True)
        elif (call := match_attention(self.known.mod, value)) is not None:
            slots = attention_slots(call, self.count)
            for number, x in enumerate(tensors_of(value)):
                if x.same_as(var) and slots[number] != shard:
                    raise NotShardable("an attention reads it that is divided by its heads")
            self._apply(reader, slots, forced=True)
        else:
            numbers = [n for n, x in enumerate(tensors_of(value)) if x.same_as(var)]
            if not numbers:
                raise NotShardable("no rule divides what reads it")
            for number in numbers:
                self._apply(reader, self._slots(value, number, shard), forced=True)

    def _slots(self, value, slot, shard) -> Slots:
        if self.known.scatter(value) is not None:
            return scatter_slots(value, slot, shard)
        return slots_of(value, slot, shard, self.count)

    def _check_results(self, var, results: relax.Tuple) -> None:
        """NotShardable where a variable is among the results that are the caller's."""
        new = [x for _, x in self.known.states]
        if any(x.same_as(var) for x in results.fields[: self.known.outputs]) or not any(x.same_as(var) for x in new):
            raise NotShardable(READ_BY_CALLER)

    def _apply(self, var, slots: Slots, forced: bool) -> None:
        """Note the slots of a call and what they ask of its operands and of its result.

        `forced` says that they follow from an operand.
        """
        if (known := self.slots.get(var, self.known.slots.get(var))) is not None:
            if known != slots:
                raise NotShardable("two ways of dividing it meet")
            return
        self.slots[var] = slots
        if isinstance(slots[RESULT], Shard):
            self._assign(var, slots[RESULT], forced)
        for number, x in enumerate(tensors_of(self.bindings.values[var])):
            if isinstance(slots[number], Shard):
                self._need(x, slots[number])

    def _assign(self, var, shard: Shard, forced: bool) -> None:
        self._check(var, shard)
        if var in self.known.shards or var in self.known.slots:
            if self.known.shards.get(var) != shard:
                raise NotShardable("two ways of dividing it meet")
            return
        if forced:
            self.forced.add(var)
            if var in self.whole:
                raise NotShardable("something reads it whole")
        if var in self.shards:
            if self.shards[var] != shard:
                raise NotShardable("two ways of dividing it meet")
            return
        self.shards[var] = shard
        self.pending.append(var)

    def _need(self, expr, shard: Shard) -> None:
        """Divide an operand, or note that it will be sliced."""
        self._check(expr, shard)
        if isinstance(expr, GenericConst):
            return
        is_known = self.known.shards.get(expr) == shard
        is_own = any(parameter.same_as(expr) for parameter, _ in self.known.states)
        is_whole = expr not in self.bindings.values and not is_own or expr in self.whole or expr in self.known.slots
        if is_known or expr in self.shards and self.shards[expr] == shard:
            return
        if expr in self.shards or expr in self.known.shards:
            raise NotShardable("two ways of dividing it meet")
        if is_whole:
            if isinstance(expr.ty, relax.TupleType) or not (self.may_slice or self.known.is_weight(expr)):
                raise NotShardable("it is not computed by a product by a weight")
            return
        self._assign(expr, shard, forced=False)

    def _give_up(self, var, reason: str = "it is not computed by a product by a weight") -> None:
        """Compute a variable whole, if nothing divided leads to it and slices are allowed."""
        if var in self.forced or not (self.may_slice or self.known.is_weight(var)):
            raise NotShardable(reason)
        raise _Whole(var)

    def _check(self, expr, shard: Shard) -> None:
        if isinstance(expr.ty, relax.TensorType):
            shard.check(shape_of(expr), self.count)

    def _of_tuple(self, value: relax.TupleGetItem, shard: Shard) -> Shard:
        """The Shard of what is split, given that of one field."""
        split = self.bindings.call(value.tuple_value, "split")
        if split is None:
            raise NotShardable("no rule divides a tuple")
        axis, fields = split_at(split)
        if axis != shard.axis:
            return shard
        sizes = [(end - first,) if n != value.index else shard.sizes for n, (first, end) in enumerate(fields)]
        return Shard(axis, tuple(size for field in sizes for size in field))

    def _among_slices(self, operand, shard: Shard) -> Shard:
        """A Shard with borders also where other slices of the operand begin and end, along the same axis."""
        borders = {0}
        for size in shard.sizes:
            borders.add(max(borders) + size)
        for reader in self.bindings.readers[operand] if isinstance(operand, relax.Var) else ():
            if (call := self.bindings.call(reader, "strided_slice")) is not None:
                first, end, _ = sliced_at(call).get(shard.axis, (0, 0, 1))
                borders |= {first, end}
        cut = sorted(borders)
        return Shard(shard.axis, tuple(end - first for first, end in zip(cut, cut[1:])))
