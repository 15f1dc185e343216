"""The operators of a Relax function in canonical order, and the views between them.

Matrix products and convolutions are compute-intensive (CI).  ATTENTION is a call of an attention kernel, and SORT an
operator that sorts rows.  Everything else that computes is memory-intensive (MI).  Views (reshapes, transposes, slices,
tuples) do not count as operators: each belongs to the operators that it connects.  Expressions of constants do not
count either.

The order is depth-first from the function's results.  So an operator follows the operators that only it reads, and
chains stay adjacent on branching graphs, whatever order the model was written in.  Of an operator's operands, that
behind most products and attentions comes first, so that a cast of what has long been computed stands by its reader;
then from left to right.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.operators.grouped_products import GROUPED
from relax_passes.ir.operators.sorting import SORTING

CI, MI, ATTENTION, SORT = "CI", "MI", "attention", "sort"

COMPUTE_INTENSIVE = {"matmul", "einsum", *GROUPED, *(f"nn.conv{n}d{t}" for n in (1, 2, 3) for t in ("", "_transpose"))}
VIEWS = {"reshape", "expand_dims", "squeeze", "flatten", "permute_dims", "split", "strided_slice", "broadcast_to"}


@dataclass(frozen=True)
class Operator:
    """One operator, apart from the function it is in.

    Attributes
    ----------
    name : str
        The Relax operator without "relax.", or the called function.
    kind : str
        CI, MI, ATTENTION or SORT.
    inputs : tuple of int
        The operators it reads, directly or through views; all come before it.
    site : str
        The attention that an ATTENTION operator belongs to: operators with the same site are one attention.
    """

    name: str
    kind: str
    inputs: tuple[int, ...] = ()
    site: str = ""


class OperatorGraph:
    """The operators of a function of one dataflow block, and where they are in it.

    Attributes
    ----------
    operators : tuple of Operator
        In canonical order.
    variables : tuple of relax.Var
        The variable that each operator is bound to.
    index : dict of relax.Var to int
        The inverse of `variables`.
    readers : tuple of set of int
        The operators that read each operator, directly or through views.
    results : set of int
        The operators whose values the function returns.
    bindings : Bindings
        The bindings of the function.
    descriptions : dict
        A cache of `segment_signature`: descriptions of operators.
    work : dict
        A cache of `InitialScheme`: the work of operators.
    """

    def __init__(self, function: relax.Function):
        self.function = function
        self.bindings = Bindings(function)
        self.closed = ClosedExpressions(self.bindings).closed_vars
        self.index = {}
        self.descriptions = {}
        self.work = {}
        self._roots = {}
        for var in self._depth_first():
            if self._is_operator(var):
                self.index[var] = len(self.index)
        self.variables = tuple(self.index)
        self.operators = tuple(self._operator(var) for var in self.variables)
        self.readers = tuple(set() for _ in self.operators)
        for i, reader in enumerate(self.operators):
            for j in reader.inputs:
                self.readers[j].add(i)
        roots = frozenset().union(*(self.roots(var) for var in self.bindings.outputs))
        self.results = {self.index[root] for root in roots if root in self.index}

    def sources(self, var) -> list:
        """The variables that `var`'s expression reads, in order, without those that depend on constants only."""
        if var not in self.bindings.values:
            return []
        return [v for v in self.bindings.reads[var] if v not in self.closed]

    def is_view(self, var) -> bool:
        """Whether `var` rearranges what other variables hold."""
        return var in self.bindings.values and var not in self.index

    def roots(self, var) -> frozenset:
        """The operators' variables and parameters that a view is made from; for any other variable, the variable."""
        if not self.is_view(var):
            return frozenset([var])
        if var not in self._roots:
            self._roots[var] = frozenset().union(*(self.roots(source) for source in self.sources(var)))
        return self._roots[var]

    def moves_data(self, var) -> bool:
        """Whether a view reorders, drops, repeats or joins the elements that it is made from."""
        if not self.is_view(var) or var in self.closed:
            return False
        value = self.bindings.values[var]
        if isinstance(value, relax.Call) and self.bindings.same_elements(var) is None:
            return True
        return any(self.moves_data(source) for source in self.sources(var))

    def _depth_first(self) -> list:
        """Every variable that the results depend on, after its sources."""
        steps: dict = {}  # products and kernels that a variable is behind
        read: dict = {}  # the parameters that it is computed from, without a kernel
        seen: dict = {}  # the parameters that it is a view of
        by_kernels = set()
        for var in (plain := self._after_sources(lambda _, sources: sources)):
            sources, is_operator = self.sources(var), self._is_operator(var)
            kind = _kind(self.bindings.values[var]) if is_operator else MI
            steps[var] = max((steps.get(source, 0) for source in sources), default=0) + (kind != MI)
            # What is neither computed nor closed is a parameter.
            read[var], given = (frozenset().union(*(x.get(s, {s}) for s in sources)) for x in (read, seen))
            seen[var] = frozenset() if is_operator else given
            if kind == ATTENTION:
                by_kernels |= given
                read[var] = frozenset()
        # A kernel may write into a parameter, a state: what reads its old value stays where it is.
        held = {var for var in plain if read[var] & by_kernels}

        def deepest_first(var, sources: list) -> list:
            if not self._is_operator(var) or held & set(sources):
                return sources
            return sorted(sources, key=lambda source: -steps.get(source, 0))

        return self._after_sources(deepest_first)

    def _after_sources(self, arranged: Callable[[relax.Var, list], list]) -> list:
        """The same, by the order of each variable's sources."""
        order, entered, done = [], set(), set()
        pending = list(reversed(relax.analysis.free_vars(self.function.body.body)))
        while pending:
            var = pending.pop()
            if var in done or var in self.closed or var not in self.bindings.values:
                continue
            if var in entered:
                done.add(var)
                order.append(var)
                continue
            entered.add(var)
            pending += [var, *reversed(arranged(var, self.sources(var)))]
        return order

    def _is_operator(self, var) -> bool:
        value = self.bindings.values[var]
        if not isinstance(value, relax.Call):
            return False
        if operator(value) == "take":
            return not isinstance(self.bindings.value(value.args[1]), GenericConst)
        return operator(value) not in VIEWS

    def _operator(self, var) -> Operator:
        value = self.bindings.values[var]
        name, kind = operator(value), _kind(value)
        if kind == ATTENTION:
            callee = value.args[0] if name else value.op
            name = getattr(callee, "name_hint", None) or getattr(callee, "global_symbol", None) or str(callee)
        roots = frozenset().union(*(self.roots(source) for source in self.sources(var)))
        inputs = tuple(sorted(self.index[root] for root in roots if root in self.index))
        return Operator(name, kind, inputs, site=f"{name} #{self.index[var]}" if kind == ATTENTION else "")


def _kind(value: relax.Call) -> str:
    name = operator(value)
    if not name or name.startswith("call_"):
        return ATTENTION
    return CI if name in COMPUTE_INTENSIVE else SORT if name in SORTING else MI
