"""GatheredRows: grouped products read rows that are chosen at run time where they lie, as experts choose tokens.

    grouped_linear(take(x, rows), w, offsets)  →  grouped_linear(x, w, offsets, rows)

Nothing is written in the order of the groups.  It is done where a template computes the result in less predicted time
than the gather and the product take.  Preconditions: "main" is one dataflow block; x is a matrix in half precision and
rows a vector; a row that does not exist is NaN, or may be anything; nothing but the product reads the gathered rows.
"""

from collections import Counter
from dataclasses import replace

import tvm
from tvm import relax

from relax_passes.fusion.matching.embedding import gather_of_rows
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of, static_shape
from relax_passes.ir.operators.grouped_products import GROUPED, grouped_product, problem_of_call
from relax_passes.ir.rebuild import rebuild
from tir_kernels.errors import StofError
from tir_kernels.fusion.grouped.problem import INDEX_DTYPES

HALF = ("float16", "bfloat16")


@tvm.transform.module_pass(opt_level=0, name="GatheredRows")
class GatheredRows:
    """Join gathers and the grouped products of "main" that read them; `chooser` knows the target and its templates."""

    def __init__(self, chooser: TemplateChooser):
        self.chooser = chooser

    def transform_module(self, mod, _ctx):
        bindings = Bindings(mod["main"])
        readers = Counter(x for var in bindings.values for x in bindings.reads[var])
        readers.update(relax.analysis.free_vars(mod["main"].body.body))
        found = {}
        for var, value in bindings.values.items():
            if isinstance(value, relax.Call) and operator(value) in GROUPED and len(value.args) == 3:
                a, w, offsets = value.args
                take = self._gather(bindings, a)
                if take is not None and readers[a] == 1 and self._is_faster(value, take):
                    found[var] = grouped_product(take[0], w, offsets, GROUPED[operator(value)], take[1])
        return rebuild(mod, lambda _, var, new: new(found[var]) if var in found else None) if found else mod

    def _gather(self, bindings: Bindings, a) -> tuple | None:
        """(matrix, rows) of which `a` is taken; None if it is anything else."""
        take = bindings.call(a, "take") if isinstance(a, relax.Var) else None
        if take is None or take.attrs.axis is None or str(take.attrs.mode) not in ("nan", "fast"):
            return None
        matrix, rows = take.args
        ranks = [len(static_shape(x) or ()) for x in (matrix, rows)]
        if ranks != [2, 1] or int(take.attrs.axis) % 2 != 0:
            return None
        return (matrix, rows) if dtype_of(matrix) in HALF and dtype_of(rows) in INDEX_DTYPES else None

    def _is_faster(self, product: relax.Call, gather: tuple) -> bool:
        matrix, rows = gather
        count, index = shape_of(matrix)[0], dtype_of(rows)
        try:
            apart = problem_of_call(product)
            joined = replace(apart, gathered_from=count, rows_dtype=index)
            gathering = gather_of_rows(apart.m, apart.k, apart.dtype, count, index)
        except StofError:
            return False
        return self.chooser.us(joined) < self.chooser.us(apart) + self.chooser.us(gathering)
