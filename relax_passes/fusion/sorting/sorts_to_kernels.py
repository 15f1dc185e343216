"""SortsToKernels: argsort, sort and topk become operators whose kernels this project has.

    argsort(x), and gather_elements(x, argsort(x))       order and values of one sort_runs(x), if rows are short
                                                         … of merge_runs(sort_runs(x)), once or more often, if long

Preconditions: for CUDA; "main" is one dataflow block; after `FoldClosedExpressions`, before `PartitionSegments`.  A
sort is rewritten if all lengths are numbers and none is 0, its dtype is one of a kernel's, and it depends on an input.
What is gathered at the places that a sort gave, from the tensor that it sorted, are the sorted values, which the kernel
writes, too.  What writes 0 … n - 1 at these places is the rank of each element, another output of it.
"""

import math
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.fusion.sorting.keys import sorted_elements
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.closed_expressions import ClosedExpressions
from relax_passes.ir.operators.sorting import sorting_call
from relax_passes.ir.rebuild import rebuild
from tir_kernels.fusion.registry import templates_for
from tir_kernels.fusion.sorting.problem import KEYS, MAX_FAN, MAX_RUN, ORDER_DTYPES, MergeProblem, SortProblem
from tir_kernels.scatter import is_permuting

op = relax.op
SORTS = ("argsort", "sort", "topk")


@tvm.transform.module_pass(opt_level=0, name="SortsToKernels")
class SortsToKernels:
    """Rewrite the sorts of "main" that kernels of the target compute."""

    def __init__(self, target: tvm.target.Target):
        self.target = target

    def transform_module(self, mod, _ctx):
        rewriter = _Rewriter(mod, self.target)
        return rebuild(mod, rewriter.replace) if rewriter.sorts else mod


@dataclass(frozen=True)
class _Sort:
    """A sort of `x` along an axis, of which the first `keep` elements are wanted; what the operator gives of it."""

    x: relax.Expr
    axis: int
    keep: int
    descending: bool
    order_dtype: str
    gives: tuple[str, ...]

    def problems(self, ranks: bool) -> list[SortProblem | MergeProblem]:
        """The problems whose kernels compute it, one after another."""
        shape, dtype, largest = shape_of(self.x), dtype_of(self.x), self.descending
        n = shape[self.axis]
        rows, run = math.prod(shape) // n, min(n, MAX_RUN)

        def common(is_last: bool):
            return largest, self.order_dtype if is_last else "int32", ranks and is_last

        found: list = [SortProblem(rows, n, run, min(self.keep, run), dtype, *common(n <= run))]
        while found[-1].out_runs > 1:
            n, run = found[-1].kept, found[-1].keep
            keep = min(self.keep, run * MAX_FAN, n)
            found.append(MergeProblem(rows, n, run, keep, dtype, *common(n <= run * MAX_FAN)))
        return found


class _Rewriter:
    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target):
        self.mod, self.bindings = mod, Bindings(mod["main"])
        self.closed = ClosedExpressions(self.bindings).closed_vars
        self.templates = templates_for(target)
        self.target = target
        found = ((var, self._sort(var)) for var in self.bindings.values if var not in self.closed)
        self.sorts: dict[relax.Var, _Sort] = {var: sort for var, sort in found if sort is not None}
        self.inverses: dict[relax.Var, relax.Var] = {}  # the ranks, and the sort that they are of
        for var in self.bindings.values if self.sorts else ():
            if (sort := self._inverted(var)) is not None:
                self.inverses[var] = sort
        self.results: dict[relax.Var, dict[str, relax.Expr]] = {}

    def replace(self, builder, var, new):
        """The new expression of a sort, of its values, and of its ranks; None for any other variable."""
        if var in self.sorts:
            self.results[var] = results = self._emit(builder, var, new)
            fields = [results[name] for name in self.sorts[var].gives]
            return relax.Tuple(fields) if isinstance(var.ty, relax.TupleType) else fields[0]
        if var in self.inverses:
            return op.reshape(self.results[self.inverses[var]]["ranks"], shape_of(var))
        gather = self.bindings.call(var, "gather_elements")
        source = None if gather is None else self._order(gather.args[1])
        if gather is not None and source in self.results:
            sort = self.sorts[source]
            axis = int(gather.attrs.axis) % len(shape_of(var))
            if axis == sort.axis and self._same(gather.args[0], sort.x):
                return self.results[source]["values"]
        return None

    def _sort(self, var) -> _Sort | None:
        call = self.bindings.call(var, *SORTS)
        if call is None or not self.bindings.values[var].same_as(call) or not static_shape(call.args[0]):
            return None
        x = sorted_elements(self.bindings, call.args[0])
        shape, name, attrs = shape_of(x), operator(call), call.attrs
        axis = int(attrs.axis) % len(shape)
        keep, order_dtype = shape[axis], "int32"
        gives: tuple[str, ...] = ("values",)
        if name == "topk":
            if int(attrs.k) > keep:
                return None
            keep = int(attrs.k) if int(attrs.k) > 0 else keep
            gives = {"both": ("values", "order"), "values": ("values",), "indices": ("order",)}[str(attrs.ret_type)]
        elif name == "argsort":
            gives = ("order",)
        if name != "sort":
            order_dtype = str(attrs.dtype)
        if 0 in shape or dtype_of(x) not in KEYS or order_dtype not in ORDER_DTYPES:
            return None
        if "values" in gives and dtype_of(x) != dtype_of(call.args[0]):  # values of keys are no values of x
            x = call.args[0]
        descending = bool(attrs.largest if name == "topk" else attrs.descending)
        sort = _Sort(x, axis, keep, descending, order_dtype, gives)
        return sort if all(map(self._is_computed, sort.problems(False))) else None

    def _is_computed(self, problem) -> bool:
        return any(template.unsupported(problem, self.target) is None for template in self.templates)

    def _emit(self, builder, var, new) -> dict[str, relax.Expr]:
        """The results of a sort, in the shape of its operand."""
        sort, ranks = self.sorts[var], var in self.inverses.values()
        shape = shape_of(sort.x)
        axes = [axis for axis in range(len(shape)) if axis != sort.axis] + [sort.axis]
        is_last, outer = sort.axis == len(shape) - 1, [shape[axis] for axis in axes[:-1]]
        x = new(sort.x) if is_last else builder.emit(op.permute_dims(new(sort.x), axes))
        problems = sort.problems(ranks)
        flat = problems[0].rows, problems[0].n
        arguments = [x if tuple(outer) == flat[:1] else builder.emit(op.reshape(x, flat))]
        for problem in problems:
            results = builder.emit(sorting_call(problem, *arguments))
            count = len(problem.outputs)
            arguments = [builder.emit(relax.TupleGetItem(results, i)) for i in range(count)]
        found = {}
        for name, result in zip(("values", "order", "ranks"), arguments):
            length = shape_of(result)[1]
            if outer != [flat[0]]:
                result = builder.emit(op.reshape(result, [*outer, length]))
            if not is_last:
                result = builder.emit(op.permute_dims(result, list(map(axes.index, range(len(axes))))))
            found[name] = result
        return found

    def _order(self, expr):
        """The sort that `expr` is the order of, or None."""
        while isinstance(expr, relax.Var):
            if expr in self.sorts:
                return expr if self.sorts[expr].gives == ("order",) else None
            value = self.bindings.values.get(expr)
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.sorts:
                return value.tuple_value if self.sorts[value.tuple_value].gives[value.index] == "order" else None
            expr = value
        return None

    def _same(self, a, b) -> bool:
        return self.bindings.value(a).same_as(self.bindings.value(b))

    def _inverted(self, var):
        """The sort of one row of whose order `var` is the inverse: 0 … n - 1 are written at its places."""
        call = self.bindings.call(var, "call_tir")
        if call is None or not is_permuting(self.mod[call.args[0]]):
            return None
        index, update = self.bindings.value(call.args[1]).fields
        while (inner := self.bindings.same_elements(update)) is not None:
            update = inner
        source, numbers = self._order(index), self.bindings.value(update)
        if source is None or not isinstance(numbers, GenericConst):
            return None
        sort, values = self.sorts[source], numbers.value.numpy().ravel()
        is_whole = shape_of(sort.x) == (values.size,) == (sort.keep,) and sort.order_dtype == dtype_of(var)
        return source if is_whole and (values == np.arange(values.size)).all() else None
