"""Emit the functions of rules: they compute which blocks an attention keeps, from its q and k.

    map = rule(q * (scale * √D), k)        bool (B or 1, H or 1, query blocks, key blocks), operand of the kernel

A rule takes the scale for 1 / √D, so q takes what another scale differs by, in float32 where float16 might overflow.
The rule's function is added to the module as it was imported; `InlinePrivateFunctions` then puts its operators among
the model's.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.composite import AttentionCall
from relax_passes.attention.fold_conditions import FoldConditions
from relax_passes.attention.fold_scalars import FoldScalars
from relax_passes.attention.found_blocks.results import emit_density, kept_in_blocks
from relax_passes.attention.site_names import named
from relax_passes.ir.bindings import Bindings, dtype_of, operator, shape_of
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.ir.rebuild import new_main, substitute
from tir_kernels.attention.mask_forms import MaskLike
from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.rule_scale import rule_scale
from tir_kernels.errors import UnsupportedError
from tir_kernels.report_rows import RewrittenRow

VIEWS = ("reshape", "expand_dims", "squeeze", "flatten", "permute_dims", "broadcast_to", "strided_slice", "astype")


class SiteRule(Protocol):
    """What passes need of the rule of an attention; its repr is what reports show."""

    @property
    def block(self) -> tuple[int, int]:
        """Height and width of a block: query rows by keys."""
        ...

    def traced(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: str) -> tvm.IRModule:
        """A module whose "main" takes q and k, of these shapes, and returns a tuple of the block map alone.

        Equal arguments give the same module.  Raises MaskError for a map of another shape; the errors of the frontend
        for what it cannot import.
        """
        ...


@dataclass(frozen=True)
class RuleFunction:
    """The function of a rule for operands of one shape: in the module, the map's description, and its operators."""

    name: tvm.ir.GlobalVar
    block_map: BlockMap
    operators: tuple[str, ...]


class RuleEmitter:
    """Adds the function of each rule to the builder's module once, and emits its calls.

    `constant` makes a constant of an array.
    """

    def __init__(self, builder: relax.BlockBuilder, constant: Callable):
        self.builder, self.constant = builder, constant
        self.functions: dict[tuple, RuleFunction] = {}
        self.results: list[relax.Var] = []  # what the program is to return of the maps (results.py)

    def function(self, rule: SiteRule, call: AttentionCall) -> RuleFunction:
        """The rule's function for an attention; UnsupportedError over a cache, and what `SiteRule.traced` raises."""
        if call.positions is not None or call.first_row is not None:
            raise UnsupportedError(
                f"attention {named(call.site)} is over a cache that the model updates, where {rule!r} would see places "
                "that hold no token yet: give a static mask"
            )
        q_shape, k_shape = shape_of(call.q), shape_of(call.k)
        _, dtype = rule_scale(call.scale, q_shape[3], dtype_of(call.q))
        module = rule.traced(q_shape, k_shape, dtype)
        key = module, rule.block
        if key not in self.functions:
            self.functions[key] = self._added(module, rule.block)
        return self.functions[key]

    def block_map(
        self,
        function: RuleFunction,
        q: relax.Expr,
        k: relax.Expr,
        mask: MaskLike | None,
        problem: AttentionProblem,
        is_result: bool,
    ) -> relax.Var:
        """Emit the map of an attention with a mask, and what is returned of it: the map itself only if `is_result`."""
        emit, (factor, dtype) = self.builder.emit, rule_scale(problem.scale, problem.head_dim, problem.dtype)
        if factor != 1:  # multiplied in float32, as PyTorch multiplies halves by a number
            q = emit(relax.op.multiply(self._cast(q, "float32"), relax.const(factor, "float32")))
            q, k = self._cast(q, dtype), self._cast(k, dtype)
        found = relax.Call(function.name, [q, k])
        block_map = self._result(found) if is_result else emit(found)
        kept = self.constant(kept_in_blocks(mask, problem))
        density = self._result(emit_density(emit, block_map, kept, problem.q_len * problem.kv_len))
        self.results += [density, block_map] if is_result else [density]
        return block_map

    def take_results(self) -> list[relax.Var]:
        """What the function that was built last is to return; the next one begins anew."""
        results, self.results = self.results, []
        return results

    def _cast(self, x: relax.Expr, dtype: str) -> relax.Expr:
        """Emit a tensor in another dtype; the tensor itself where it has that."""
        return x if dtype_of(x) == dtype else self.builder.emit(relax.op.astype(x, dtype))

    def _result(self, expr: relax.Expr) -> relax.Var:
        """Emit what can be returned."""
        is_dataflow = self.builder.current_block_is_dataflow()
        return self.builder.emit_output(expr) if is_dataflow else self.builder.emit(expr)

    def _added(self, module: tvm.IRModule, block: tuple[int, int]) -> RuleFunction:
        module = tvm.transform.Sequential([FoldScalars(), FoldConditions()])(_of_one_result(module))
        others = {
            name: self.builder.add_func(function.without_attr("global_symbol"), name.name_hint)
            for name, function in module.functions_items()
            if name.name_hint != "main"
        }
        renamed = _Renamed(others)
        with closing_blocks(renamed.builder_):
            main = renamed.visit_expr(module["main"])
        batch, heads, _, _ = (int(n) for n in main.ret_ty.shape)
        names = [_name(value) for value in Bindings(main).values.values()]
        operators = tuple(dict.fromkeys(name for name in names if name and name not in VIEWS))
        name = self.builder.add_func(main.without_attr("global_symbol"), "rule")
        return RuleFunction(name, BlockMap(batch, heads, *block), operators)


def _name(value: relax.Expr) -> str:
    """The operator of a call, or the function in the module that it calls; "" for no call."""
    return str(value.args[0].name_hint) if operator(value) == "call_tir" else operator(value)


def described(row: RewrittenRow, rule: SiteRule, function: RuleFunction, problem: AttentionProblem) -> RewrittenRow:
    """The row of an attention whose blocks a rule finds: the density is that of the mask within which it does."""
    height, width = rule.block
    note = (
        f"{rule!r} keeps blocks of {height}×{width} of the mask, found in each call by {len(function.operators)} kinds "
        f"of operators ({', '.join(function.operators)})"
    )
    notes = (*(note for note in row.notes if not note.startswith("no static mask")), note)
    shape = function.block_map.shape(problem.q_len, problem.kv_len)
    return replace(row, rule=repr(rule), block_map=shape, notes=notes)


def _of_one_result(module: tvm.IRModule) -> tvm.IRModule:
    """The module, its "main" returning the one field of the tuple that it returns."""
    bindings = Bindings(module["main"])

    def body(builder):
        mapping: dict = {}
        for var, value in bindings.values.items():
            if not isinstance(value, relax.Tuple):
                mapping[var] = builder.emit(substitute(value, mapping), var.name)
        (field,) = bindings.value(module["main"].body.body).fields
        return substitute(field, mapping)

    return new_main(module, body)


@mutator
class _Renamed(PyExprMutator):
    """Replaces the functions that are called by others."""

    def __init__(self, others: dict):
        super().__init__()
        self.others = others

    def visit_global_var_(self, op):
        return self.others.get(op, op)
