"""Rewriting of the "main" of a module, in one dataflow block."""

from collections.abc import Callable

import tvm
from tvm import relax

from relax_passes.ir.open_blocks import closing_blocks


def new_main(
    mod: tvm.IRModule, body: Callable[[relax.BlockBuilder], relax.Expr], parameters: list[relax.Var] | None = None
) -> tvm.IRModule:
    """`mod` with another "main", of the same parameters unless others are given.

    `body` emits bindings and returns the result's expression.  Bindings that nothing reads and functions that nothing
    calls are dropped.
    """
    function = mod["main"]
    others = {name: func for name, func in mod.functions_items() if name.name_hint != "main"}
    builder = relax.BlockBuilder(tvm.IRModule(others, attrs=mod.attrs))
    attrs = {name: value for name, value in function.attrs.items() if name != "global_symbol"}
    with closing_blocks(builder), builder.function("main", parameters or list(function.params), attrs):
        with builder.dataflow():
            output = builder.emit_output(body(builder))
        builder.emit_func_output(output)
    tidy = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
    return tvm.transform.Sequential(tidy)(builder.finalize())


def rebuild(mod: tvm.IRModule, replace: Callable, parameters: dict | None = None) -> tvm.IRModule:
    """`mod` with a "main" in which bindings have other expressions.

    `replace(builder, var, new)` is called for each variable bound in the old function; it returns the new expression,
    or None to keep the old one.  `new(expr)` is the old expression `expr` written in new variables, those bound so far.
    `parameters` maps parameters to others that take their places.
    """
    function = mod["main"]
    others = parameters or {}

    def body(builder):
        mapping = dict(others)
        for block in function.body.blocks:
            for binding in block.bindings:
                new = replace(builder, binding.var, lambda expr: substitute(expr, mapping))
                new = substitute(binding.value, mapping) if new is None else new
                mapping[binding.var] = builder.emit(new, binding.var.name)
        return substitute(function.body.body, mapping)

    return new_main(mod, body, [others.get(parameter, parameter) for parameter in function.params])


def substitute(expr, mapping: dict):
    """The expression with variables replaced.  It must be flat, as the expressions in bindings are."""
    if isinstance(expr, relax.Var):
        return mapping.get(expr, expr)
    if isinstance(expr, relax.Call):
        arguments = [substitute(argument, mapping) for argument in expr.args]
        return relax.Call(expr.op, arguments, expr.attrs, expr.ty_args, expr.span)
    if isinstance(expr, relax.Tuple):
        return relax.Tuple([substitute(field, mapping) for field in expr.fields])
    if isinstance(expr, relax.TupleGetItem):
        return relax.TupleGetItem(substitute(expr.tuple_value, mapping), expr.index)
    return expr
