"""Projections: products of a value and a constant weight, with a constant bias."""

from dataclasses import dataclass

from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings, dtype_of, permutation, shape_of


@dataclass(frozen=True)
class Projection:
    """x @ w [+ bias], bound to `result`; `weight` is w (k, n), or (n, k) if `transposed`."""

    x: relax.Var
    weight: GenericConst
    transposed: bool
    bias: GenericConst | None
    result: relax.Var


def match_projection(bindings: Bindings, var) -> Projection | None:
    """The projection whose product is bound to `var`, or None."""
    product = bindings.call(var, "matmul")
    if product is None or bindings.values[var] is not product or not isinstance(product.args[0], relax.Var):
        return None
    x, weight = product.args
    transpose = bindings.call(weight, "permute_dims")
    if transpose is not None and permutation(transpose) == [1, 0]:
        weight = transpose.args[0]
    weight = bindings.value(weight)
    is_matrix = isinstance(weight, GenericConst) and len(weight.ty.shape) == 2
    if not is_matrix or len({dtype_of(value) for value in (x, weight, product)}) != 1:
        return None
    readers = bindings.readers[var]
    bias = _bias(bindings, var, readers[0]) if len(readers) == 1 and var not in bindings.outputs else None
    return Projection(x, weight, transpose is not None, bias, var if bias is None else readers[0])


def _bias(bindings, product, reader) -> GenericConst | None:
    """The constant vector that `reader` adds to the product; None if `reader` does anything else."""
    total = bindings.call(reader, "add")
    for operand in total.args if total is not None else ():
        value = bindings.value(operand)
        is_constant = isinstance(value, GenericConst) and dtype_of(value) == dtype_of(product)
        if is_constant and shape_of(value) == shape_of(product)[-1:]:
            return value
    return None
