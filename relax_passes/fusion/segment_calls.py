"""Calls of segments in "main", and which call reads the result of which other one."""

from collections.abc import Iterable
from dataclasses import dataclass

from tvm import relax

from relax_passes.fusion.template_choice import TemplateChoice
from relax_passes.ir.bindings import Bindings


@dataclass(frozen=True)
class SegmentCall:
    """A call in "main" of a segment's function that a template computes."""

    var: relax.Var
    function: relax.Function
    arguments: tuple
    choice: TemplateChoice

    def results(self) -> list:
        """The variables that the function returns."""
        body = self.function.body.body
        return list(body.fields) if isinstance(body, relax.Tuple) else [body]


class SegmentCalls:
    """The calls of "main" by their variables.

    Attributes
    ----------
    inside : dict of relax.Var to Bindings
        The bindings of each call's function.
    """

    def __init__(self, main: Bindings, calls: Iterable[SegmentCall]):
        self.main = main
        self.calls = {call.var: call for call in calls}
        self.inside = {var: Bindings(call.function) for var, call in self.calls.items()}

    def __iter__(self):
        return iter(self.calls)

    def __getitem__(self, var) -> SegmentCall:
        return self.calls[var]

    def writer(self, var, expr) -> relax.Var | None:
        """The call whose kernel's only output has the elements of `expr`, an expression inside the segment of `var`."""
        call = self.calls[var]
        source = elements_of(self.inside[var], expr)
        index = next((i for i, param in enumerate(call.function.params) if param.same_as(source)), None)
        if index is None:
            return None
        value, item = elements_of(self.main, call.arguments[index]), 0
        bound = self.main.value(value)
        if isinstance(bound, relax.TupleGetItem):
            value, item = bound.tuple_value, bound.index
        return value if value in self.calls and self._gives(value, item) else None

    def readers(self, var) -> dict[relax.Var, int] | None:
        """The calls that read the only result of `var`, each with the index of the problem's input that holds it.

        None if there are several results, if anything else reads the result, or if one call reads it twice.
        """
        if len(self.calls[var].results()) != 1 or not self._gives(var, 0):
            return None
        found, pending = {}, [var]
        while pending:
            value = pending.pop()
            if value in self.main.outputs:
                return None
            for reader in self.main.readers[value]:
                if reader in self.calls:
                    position = self._position(reader, value)
                    if position is None or reader in found:
                        return None
                    found[reader] = position
                elif elements_of(self.main, reader, steps=1).same_as(value):
                    pending.append(reader)
                else:
                    return None
        return found

    def _gives(self, var, item: int) -> bool:
        """Whether a result of a call is the only output of its kernel."""
        call = self.calls[var]
        outputs = call.choice.match.outputs
        if len(outputs) != 1 or isinstance(outputs[0].ty, relax.TupleType):
            return False
        return elements_of(self.inside[var], call.results()[item]).same_as(outputs[0])

    def _position(self, var, value) -> int | None:
        """The index of the problem's input that holds `value`; None unless this is its only use in the call `var`."""
        call, inside = self.calls[var], self.inside[var]
        params = [p for p, argument in zip(call.function.params, call.arguments) if argument.same_as(value)]
        if len(params) != 1:
            return None
        (param,) = params
        inputs = call.choice.match.inputs
        reading = [i for i, expr in enumerate(inputs) if _depends(inside, expr, param)]
        return reading[0] if len(reading) == 1 and elements_of(inside, inputs[reading[0]]).same_as(param) else None


def elements_of(bindings: Bindings, expr, steps: int | None = None):
    """The source of the elements of `expr`, in their order, through at most `steps` views and aliases, or all."""
    while steps is None or steps > 0:
        bound = bindings.values.get(expr) if isinstance(expr, relax.Var) else None
        inner = bound if isinstance(bound, relax.Var) else bindings.same_elements(expr)
        if inner is None:
            return expr
        expr = inner
        steps = None if steps is None else steps - 1
    return expr


def _depends(bindings: Bindings, expr, param) -> bool:
    """Whether an expression reads a parameter, through whatever lies between."""
    pending, seen = list(relax.analysis.free_vars(expr)), set()
    while pending:
        var = pending.pop()
        if var.same_as(param):
            return True
        if var not in seen and var in bindings.values:
            seen.add(var)
            pending += bindings.reads[var]
    return False
