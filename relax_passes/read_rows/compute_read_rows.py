"""Compute only the rows of a layer that are read, where a model reads some of them: a first token, a prompt's last one.

    x = norm(h + matmul(f(y), w))[:, :1]        →        x = norm(h[:, :1] + matmul(f(y[:, :1]), w))

Preconditions: after `FoldMasks`, before tensors are sharded; "main" is in dataflow.  Selections of rows
(selections.py) move towards what is computed, through operators that do the same to each row (moves.py), queries of
attentions among them (attentions.py).  A value is computed for the selected rows where every reader reads them only;
where one reads others as well, the whole value is computed and the rows are taken there.  So keys, values and what is
written to caches stay whole.  Selections move only as far as that spares rows of a product or of an attention: without
one, as for halves of rotary embeddings or parts of a packed projection, nothing changes.
"""

import contextlib
from collections.abc import Collection

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.composite import NOTES, match_attention
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.rebuild import rebuild
from relax_passes.parallel.rules import tensors_of
from relax_passes.read_rows.attentions import AttentionRows
from relax_passes.read_rows.emitted import RowTaker
from relax_passes.read_rows.moves import Slot, slots_of, with_operands
from relax_passes.read_rows.places import NotMoved, Place
from relax_passes.read_rows.selections import Selection, SelectionFinder

NOTE = "computed for {} of its {} queries: nothing reads the others"


@tvm.transform.module_pass(opt_level=0, name="ComputeReadRows")
class ComputeReadRows:
    """Move the selections of rows in "main" towards products and attentions.

    Parameters
    ----------
    attentions : AttentionRows or None
        Narrows attentions; None leaves them whole.
    """

    def __init__(self, attentions: AttentionRows | None = None):
        self.attentions = attentions

    def transform_module(self, mod, _ctx):
        if not all(isinstance(block, relax.DataflowBlock) for block in mod["main"].body.blocks):
            return mod
        while (moved := _moved(mod, self.attentions)) is not None:
            mod = moved
        return mod


def _moved(mod, attentions: AttentionRows | None) -> tvm.IRModule | None:
    """The module in which the first selection that can be is moved, or None."""
    bindings = Bindings(mod["main"])
    selections = SelectionFinder(bindings).found
    if not selections:
        return None
    closed = ClosedExpressions(bindings).closed_vars
    order = {var: number for number, var in enumerate(bindings.values)}
    for selection in selections:
        program = _Narrowed(mod, bindings, closed, order, selection, attentions)
        if program.readers:
            with contextlib.suppress(NotMoved):
                return program.transform()
    return None


class _Narrowed:
    """The program in which one selection is moved.

    Attributes
    ----------
    places : dict of relax.Var to Place
        The values of which nothing but the selected rows is read, and where these are.
    slots : dict of relax.Var to list of Slot
        Of those that can be computed from rows of their operands, the slots of these.
    spares : set of relax.Var
        Of these, those with a product or an attention that is computed for the selected rows.
    readers : set of relax.Var
        The selections that move.
    """

    def __init__(self, mod, bindings: Bindings, closed: Collection, order: dict, selection: Selection, attentions):
        self.mod, self.bindings, self.selection, self.attentions = mod, bindings, selection, attentions
        self.places: dict[relax.Var, Place] = {}
        self.slots: dict[relax.Var, list[Slot]] = {}
        self.spares: set[relax.Var] = set()
        pending = {reader.source for reader in selection.readers.values()} - {*closed}
        while pending:
            var = max(pending, key=order.__getitem__)  # behind it is none that reads it
            pending.discard(var)
            if (place := self._place_of(var)) is None:
                continue
            self.places[var] = place
            try:
                self.slots[var] = self._slots_of(bindings.values[var], place)
            except NotMoved:
                continue
            operands = zip(self._operands(bindings.values[var]), self.slots[var], strict=True)
            moved = {x for x, slot in operands if isinstance(slot, Place) and isinstance(x, relax.Var)}
            pending |= {x for x in moved if x in order and x not in closed}
        for var in reversed(self.slots):  # they were found behind what reads them
            value = bindings.values[var]
            if self._is_product(value) or self._reads_spared(var, value):
                self.spares.add(var)
        self.readers = {var for var, reader in selection.readers.items() if reader.source in self.spares}

    def _place_of(self, var) -> Place | None:
        """The place of the rows if nothing else of a value is read."""
        readers = set(self.bindings.readers[var])
        if var in self.bindings.outputs or not readers:
            return None
        found: set[Slot] = set()
        for reader in readers:
            value = self.bindings.values[reader]
            if reader in self.selection.readers:
                is_index = any(x.same_as(var) for x in value.args[1:])
                found.add(None if is_index else self.selection.readers[reader].place)
                continue
            operands = self._operands(value)
            slots = self.slots.get(reader, [None] * len(operands))
            of_var = {slot for x, slot in zip(operands, slots, strict=True) if x.same_as(var)}
            found |= of_var or {None}
        place = found.pop() if len(found) == 1 else None
        return place if isinstance(place, Place) else None

    def _operands(self, value) -> list:
        if isinstance(value, relax.TupleGetItem):
            return [value.tuple_value]
        return tensors_of(value) if isinstance(value, relax.Call) else []

    def _slots_of(self, value, place: Place) -> list[Slot]:
        if (call := match_attention(self.mod, value)) is None:
            return slots_of(value, place)
        if self.attentions is None:
            raise NotMoved
        return self.attentions.slots(call, place, self.selection)

    def _is_product(self, value) -> bool:
        return operator(value) == "matmul" or match_attention(self.mod, value) is not None

    def _reads_spared(self, var, value) -> bool:
        operands = zip(self._operands(value), self.slots[var], strict=True)
        return any(isinstance(slot, Place) and x in self.spares for x, slot in operands)

    def transform(self):
        """The module in which the selections are moved."""
        taker: RowTaker | None = None
        known: dict[tuple, relax.Expr] = {}  # (value of the old program, place) -> its rows
        notes = [] if self.mod.attrs is None else list(self.mod.attrs.get(NOTES, []))

        def rows_of(x, slot: Slot, taker: RowTaker) -> relax.Expr:
            """The rows of a value, which are computed or can be taken of the whole value."""
            if slot is None:
                return taker.new(x)
            if (x, slot) not in known:
                known[x, slot] = taker.taken(x if isinstance(x, GenericConst) else taker.new(x), slot)
            return known[x, slot]

        def compute(builder, var, taker: RowTaker) -> None:
            value, place = self.bindings.values[var], self.places[var]
            pairs = zip(self._operands(value), self.slots[var], strict=True)
            operands = [rows_of(x, slot, taker) for x, slot in pairs]
            call = match_attention(self.mod, value)
            if call is not None:
                assert self.attentions is not None
                notes.append([call.site, NOTE.format(self.selection.count, self.selection.size)])
                known[var, place] = self.attentions.emit(builder, call, operands, taker)
            else:
                known[var, place] = builder.emit(with_operands(value, operands, place, self.selection.count))

        def replace(builder, var, new):
            nonlocal taker
            if var not in self.readers:
                return None
            reader = self.selection.readers[var]
            taker = taker or RowTaker(self.selection, builder.emit, new)
            for needed in self._computed_for(reader.source):
                if (needed, self.places[needed]) not in known:
                    compute(builder, needed, taker)
            return taker.result(rows_of(reader.source, reader.place, taker), var, reader)

        mod = rebuild(self.mod, replace)
        return mod.with_attr(NOTES, notes) if notes else mod

    def _computed_for(self, source) -> list[relax.Var]:
        """The values that are computed for some rows on the way to one of them, each behind its operands."""
        found, pending = {source}, [source]
        while pending:
            var = pending.pop()
            pairs = zip(self._operands(self.bindings.values[var]), self.slots[var], strict=True)
            more = {x for x, slot in pairs if isinstance(slot, Place) and x in self.spares} - found
            found |= more
            pending += more
        return [var for var in reversed(self.slots) if var in found]
