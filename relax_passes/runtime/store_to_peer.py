"""Exchanges between two GPUs without a copy: the kernel that computes a term stores it in the other rank's memory, too.

    product(a, w, term)                     there = outbox(0);  product'(a, w, term, there)
    exchange(term, other)          →        arrive();  other = inbox(0)
    norm(term, other, x, y)                 norm(term, other, x, y)

So a term crosses the link while the product goes on, and who needs the sum of both adds them.  A kernel that does not
just store its result (`with_second_output`) stays as it is, and its term is copied.

Boxes take turns.  A rank stores to a box again after another exchange, to which the other rank comes when it has run
all kernels before: so an inbox must be read before the next exchange, else it is copied; a term that is computed before
the exchange before its own is copied as well; and two exchanges that follow each other have different boxes, the last
one of a call and the first of the next one, too.

Preconditions: every operator is a call with explicit outputs (`CallTIRRewrite`), and memory is not planned yet.
"""

import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import dtype_of, operator, shape_of
from relax_passes.parallel.placement import Ranks
from relax_passes.runtime.memory_of_variables import ALLOCATION, calls_on, memory_of, packed_name, results_of
from tir_kernels.second_output import with_second_output


@tvm.transform.module_pass(opt_level=0, name="StoreToPeer")
class StoreToPeer:
    """Rewrite the calls of `ranks.exchange` in "main", if the ranks have mailboxes."""

    def __init__(self, ranks: Ranks):
        self.ranks = ranks

    def transform_module(self, mod, _ctx):
        if self.ranks.mailboxes is None:
            return mod
        bindings = [binding for block in mod["main"].body.blocks for binding in block.bindings]
        exchanges = [n for n, x in enumerate(bindings) if packed_name(x.value) == self.ranks.exchange]
        if not exchanges:
            return mod
        return _Rewriter(mod, bindings, exchanges, self.ranks.mailboxes).module()


def boxes_of(exchanges: int) -> list[int]:
    """The box of each of so many exchanges of a call, in order; neighbours differ, and so do the last and the first.

    A single exchange cannot differ from itself in the next call.
    """
    boxes = [n % 2 for n in range(exchanges)]
    if exchanges % 2 and exchanges > 1:
        boxes[-1] = 2
    return boxes


class _Rewriter:
    """The bindings of "main" while exchanges are rewritten."""

    def __init__(self, mod, bindings: list, exchanges: list[int], mailboxes):
        self.mod, self.bindings, self.exchanges = mod.clone(), bindings, exchanges
        self.values = {binding.var: binding.value for binding in bindings}
        self.numbers = {binding.var: number for number, binding in enumerate(bindings)}
        self.calls = calls_on(bindings, self.values)
        self.kept = {memory_of(var, self.values) for var in results_of(mod["main"].body.body, self.values)}
        self.boxes = boxes_of(len(exchanges))
        terms = [bindings[n].value.args[0] for n in exchanges]
        sizes = [math.prod(shape_of(x)) * tvm.DataType(dtype_of(x)).itemsize for x in terms]
        self.functions = mailboxes.boxes(max(self.boxes) + 1, max(sizes))
        self.before: dict[int, list] = {}  # bindings to add before the binding with this number
        self.instead: dict[int, list] = {}
        self.kernels: dict = {}  # GlobalVar and output -> the kernel with a second output, or None

    def module(self):
        """The rewritten module."""
        before, after = [-1, *self.exchanges[:-1]], [*self.exchanges[1:], len(self.bindings)]
        for number, box, previous, following in zip(self.exchanges, self.boxes, before, after):
            self._rewrite(number, box, previous, following)
        if len(self.exchanges) == 1:  # the other rank may still read what the call before stored there
            self.before.setdefault(0, []).append(self._call(self.functions.arrive))
        new = []
        for number, binding in enumerate(self.bindings):
            new += [*self.before.get(number, ()), *self.instead.get(number, [binding])]
        function = self.mod["main"]
        body = relax.SeqExpr([relax.BindingBlock(new)], function.body.body)
        self.mod["main"] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
        return relax.transform.CanonicalizeBindings()(relax.transform.Normalize()(self.mod))

    def _rewrite(self, number: int, box: int, previous: int, following: int) -> None:
        """Rewrite the exchange in binding `number`, between the numbers of the ones before and behind it."""
        term, other = self.bindings[number].value.args
        is_stored = self._store(term, number, box, previous)
        ready = self._call(self.functions.arrive) if is_stored else self._call(self.functions.send, term, box)
        memory = memory_of(other, self.values)
        is_own = operator(self.values.get(other)) == ALLOCATION and memory not in self.kept
        if is_own and self.calls[memory][-1] < following:
            self.instead[self.numbers[other]] = []
            self.instead[number] = [ready, relax.VarBinding(other, self._box(self.functions.inbox, box, other).value)]
        else:
            self.instead[number] = [ready, self._call(self.functions.receive, other, box)]

    def _store(self, term, exchange: int, box: int, previous: int) -> bool:
        """Let the kernel that computes a term store it in the other rank's box; False where it cannot.

        It may not run before the exchange before this one: till then the other rank may read the box.
        """
        memory = memory_of(term, self.values)
        before = [n for n in self.calls[memory] if n < exchange]
        if operator(self.values.get(memory)) != ALLOCATION or len(before) != 1 or before[0] < previous:
            return False
        (number,) = before
        call = self.bindings[number].value
        places = [n for n, x in enumerate(call.args) if isinstance(x, relax.Var) and self._is(x, memory)]
        if not isinstance(call.op, tvm.ir.GlobalVar) or places != [len(call.args) - 1]:
            return False
        kernel = self._kernel(call.op, places[0]) if call.args[-1].same_as(memory) else None
        if kernel is None:
            return False
        there = self._box(self.functions.outbox, box, memory)
        self.before.setdefault(number, []).append(there)
        sending = relax.Call(kernel, [*call.args, there.var], call.attrs, call.ty_args)
        self.instead[number] = [relax.VarBinding(self.bindings[number].var, sending)]
        return True

    def _is(self, var, memory) -> bool:
        return memory_of(var, self.values).same_as(memory)

    def _kernel(self, name, output: int):
        """The variable of the kernel with a second output, or None."""
        if name not in self.kernels:
            kernel = self.mod[name]
            changed = with_second_output(kernel, output) if isinstance(kernel, tvm.tirx.PrimFunc) else None
            if changed is not None:
                builder = relax.BlockBuilder(self.mod)
                self.kernels[name] = builder.add_func(changed.without_attr("global_symbol"), f"{name.name_hint}_sent")
                self.mod = builder.get()
            else:
                self.kernels[name] = None
        return self.kernels[name]

    def _box(self, function: str, box: int, like) -> relax.VarBinding:
        """A variable for a box as a tensor of the shape and dtype of one that is allocated."""
        shape, dtype = self.values[like].args[:2]
        call = relax.Call(relax.ExternFunc(function), [relax.prim_value(box), shape, dtype], ty_args=[like.ty])
        return relax.VarBinding(relax.Var("box", like.ty), call)

    def _call(self, function: str, *arguments) -> relax.VarBinding:
        given = [relax.prim_value(x) if isinstance(x, int) else x for x in arguments]
        nothing = relax.TupleType([])
        call = relax.Call(relax.ExternFunc(function), given, ty_args=[nothing])
        return relax.VarBinding(relax.Var("sent", nothing), call)
