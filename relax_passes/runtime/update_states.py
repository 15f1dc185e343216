"""Let kernels write new values of states into the states themselves: caches of keys and values are never copied.

    y = scatter(x, index, update)    →    scatter_in_place(x, index, update)

Preconditions: every operator is a call of a PrimFunc, bindings are in the order in which they run, reshapes are views,
and "main" has the attribute `STATES`.  A state is written in place where a chain of scatters leads from it to its new
value, and nothing reads an old value, or the state itself, after it was overwritten.  Other new values stay results;
whoever runs the module copies them into the states after the run.  Results of other kinds stay the last ones.
"""

import json

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import STATES, operator
from relax_passes.ir.constant_arrays import array_of
from tir_kernels.scatter import are_distinct, scatter_arguments, scatter_in_place, writes_in_place

COPIED = "stof.copied_states"  # of the module, JSON: for each state the number of the result to copy into it, or null


@tvm.transform.module_pass(opt_level=0, name="UpdateStates")
class UpdateStates:
    """Write states in place where that is safe; `schedule` is the pass that schedules the new kernels."""

    def __init__(self, schedule: tvm.transform.Pass):
        self.schedule = schedule

    def transform_module(self, mod, _ctx):
        function = mod["main"]
        if STATES not in (function.attrs or {}):
            return mod
        outputs, states = json.loads(str(function.attrs[STATES]))
        chains = _Chains(mod)
        found = [chains.of(function.params[parameter], chains.results[result]) for parameter, result in states]
        written = {var: call for chain in found if chain is not None for var, call in chain.items()}
        kept = [*range(outputs)]
        for (_, result), chain in zip(states, found, strict=True):
            if chain is None and result not in kept:
                kept.append(result)
        known = {*range(outputs), *(result for _, result in states)}
        kept += [number for number in range(len(chains.results)) if number not in known]
        copied = [kept.index(result) if chain is None else None for (_, result), chain in zip(states, found)]
        mod = _with_kernels(mod, chains, written, [chains.results[number] for number in kept])
        return self.schedule(mod).with_attr(COPIED, json.dumps(copied))


class _Chains:
    """The order and the memory of the bindings of "main"."""

    def __init__(self, mod: tvm.IRModule):
        self.mod, function = mod, mod["main"]
        bindings = [binding for block in function.body.blocks for binding in block.bindings]
        self.values = {binding.var: binding.value for binding in bindings}
        self.views = {binding.var: view for binding in bindings if (view := _viewed(binding.value)) is not None}
        self.readers: dict[relax.Var, list[tuple[int, relax.Var]]] = {}
        for number, binding in enumerate(bindings):
            if binding.var not in self.views:
                for var in relax.analysis.free_vars(binding.value):
                    self.readers.setdefault(self.memory(var), []).append((number, binding.var))
        self.number = {binding.var: number for number, binding in enumerate(bindings)}
        self.results = _fields(self.values, function.body.body)
        self.kept = {self.memory(result) for result in self.results if isinstance(result, relax.Var)}

    def memory(self, var: relax.Var) -> relax.Var:
        """The variable whose memory a view is of."""
        while var in self.views:
            var = self.views[var]
        return var

    def constant(self, expr: relax.Expr) -> np.ndarray | None:
        """The elements that an expression always has, if it is a constant or a view of one."""
        if isinstance(expr, relax.Var):
            expr = self.values.get(self.memory(expr), expr)
        while operator(expr) == "reshape":
            expr = expr.args[0]
        return array_of(expr) if isinstance(expr, GenericConst) else None

    def of(self, state: relax.Var, result: relax.Expr) -> dict | None:
        """The scatters from a state to its new value, by their variables; None where one cannot write in place."""
        chain: dict[relax.Var, relax.Call] = {}
        while isinstance(result, relax.Var) and self.memory(result) is not state and self.memory(result) != state:
            var = self.memory(result)
            call = self.values.get(var)
            if call is None or not self._is_scatter(call):
                return None
            chain[var] = call
            result = call.args[1].fields[0]
        if not isinstance(result, relax.Var):
            return None
        for var, call in chain.items():
            old = self.memory(call.args[1].fields[0])
            others = {self.memory(x) for x in call.args[1].fields[1:] if isinstance(x, relax.Var)}
            is_last_reader = all(number <= self.number[var] for number, _ in self.readers[old])
            # A result that shows an old value would show the new one.
            if old in others or old in self.kept or not is_last_reader:
                return None
        return chain

    def _is_scatter(self, call) -> bool:
        if operator(call) != "call_tir":
            return False
        return writes_in_place(self.mod[call.args[0]])


def _viewed(value) -> relax.Var | None:
    """The variable that a value is, or is a view of."""
    if operator(value) == "reshape":
        value = value.args[0]
    return value if isinstance(value, relax.Var) else None


def _fields(values: dict, expr) -> list:
    while isinstance(expr, relax.Var) and expr in values:
        expr = values[expr]
    return list(expr.fields) if isinstance(expr, relax.Tuple) else [expr]


def _with_kernels(mod: tvm.IRModule, chains: _Chains, written: dict, results: list[relax.Expr]) -> tvm.IRModule:
    """The module with other calls for the scatters `written`, and with `results` only."""
    builder = relax.BlockBuilder(mod)
    kernels: dict = {}

    def in_place(call):
        name, index = call.args[0], chains.constant(call.args[1].fields[1])
        how = scatter_arguments(mod[name])
        distinct = index is not None and how is not None and are_distinct(index, how)
        if (name, distinct) not in kernels:
            kernel = scatter_in_place(mod[name], distinct)
            kernels[name, distinct] = builder.add_func(kernel, f"{name.name_hint}_in_place")
        return relax.call_tir_inplace(kernels[name, distinct], list(call.args[1].fields), 0, call.ty)

    blocks = []
    for block in mod["main"].body.blocks:
        bindings = [
            relax.VarBinding(binding.var, in_place(written[binding.var])) if binding.var in written else binding
            for binding in block.bindings
        ]
        blocks.append(relax.BindingBlock(bindings))
    main = mod["main"]
    output = relax.Var("results", relax.TupleType([x.ty for x in results]))
    blocks.append(relax.BindingBlock([relax.VarBinding(output, relax.Tuple(results))]))
    body = relax.SeqExpr(blocks, output)
    mod = builder.get().clone()
    mod["main"] = relax.Function(main.params, body, output.ty, main.is_pure, main.attrs)
    return relax.transform.Normalize()(mod)
