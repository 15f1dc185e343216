"""Elementwise operators in PyTorch's computation dtype: the one wrapper of all of them.

Operands are cast to the dtype in which PyTorch computes (`torch._prims_common.elementwise_dtypes`: tensors of no
dimensions and Python numbers are weak, integers become floats for a fraction or for an operator like exp), and
`Importer._checked` casts the result to the dtype that PyTorch recorded.  Half precision is computed as such where
one operation rounds once, and in float32 where a formula would round several times or a Python number does not fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes
from tvm import relax

from stof_tvm.frontend.operators.elementwise.formulas import HALF, Formulas
from tir_kernels.errors import UnsupportedError

# Arguments of a schema that are Python numbers in some overloads, tensors in others.
OPERANDS = ("self", "other", "exponent")
KINDS = {
    "same": ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT,
    "float": ELEMENTWISE_TYPE_PROMOTION_KIND.INT_TO_FLOAT,
    "bool": ELEMENTWISE_TYPE_PROMOTION_KIND.ALWAYS_BOOL,
}


@dataclass(frozen=True)
class Elementwise:
    """An elementwise operator: `compute(f, *operands, **parameters)`.

    Parameters
    ----------
    compute : callable
        Gets `Formulas` of the computation dtype, the operands in it, and the schema's other arguments by name.
    kind : str
        "same": computes in the operands' common dtype.  "float": integers become floats.  "bool": as "same", the
        result is boolean.
    half : bool
        Whether half precision is computed as such rather than in float32.
    exact_numbers : bool
        Whether a Python number beside half precision is taken in float32, not rounded to the tensor's dtype first.
    booleans : callable, optional
        `compute` for booleans.  Without it booleans are computed as int8, as 0 and 1.
    """

    compute: Callable
    kind: str = "same"
    half: bool = False
    exact_numbers: bool = False
    booleans: Callable | None = None

    def __call__(self, context, *arguments):
        schema = context.node.target._schema.arguments
        operands, given, parameters = [], [], {}
        values = dict(zip((argument.name for argument in schema), context.node.args)) | context.node.kwargs
        for argument, value in zip(schema, arguments):
            if isinstance(value, relax.Expr) or argument.name in OPERANDS:
                operands.append(value)
                node = values[argument.name]
                given.append(node.meta["val"] if isinstance(node, torch.fx.Node) else node)
            else:
                parameters[argument.name] = value
        common, dtype = self._dtypes(context, given)
        compute = self.compute
        if dtype == "bool":
            compute, dtype = (self.booleans, "bool") if self.booleans else (compute, "int8")
        f = Formulas(context, dtype)
        return compute(f, *(self._operand(f, value, common) for value in operands), **parameters)

    def _dtypes(self, context, given) -> tuple[torch.dtype, str]:
        """The operands' common dtype, and that in which they are computed."""
        # The result's dtype: the first value, the computation dtype, is float32 for all half precision.
        _, result = elementwise_dtypes(*given, type_promotion_kind=KINDS["same"])
        if self.kind == "float" and not result.is_floating_point and not result.is_complex:
            result = torch.get_default_dtype()
        if result.is_complex:
            raise UnsupportedError("complex numbers")
        dtype = str(result).removeprefix("torch.")
        numbers = [x for x in given if not isinstance(x, torch.Tensor)]
        if dtype in HALF and not (self.half and all(_fits(number, result) for number in numbers)):
            dtype = "float32"
        return result, dtype

    def _operand(self, f, value, common):
        if isinstance(value, relax.Expr):
            return f.cast(value, f.dtype)
        if str(common)[6:] in HALF and not self.half and not self.exact_numbers:
            value = torch.tensor(value, dtype=common).item()
        try:
            return f.operand(value)
        except OverflowError as error:
            raise UnsupportedError(f"the number {value} is not in the range of {f.dtype}") from error


def _fits(number, dtype: torch.dtype) -> bool:
    """Whether half precision changes a Python number by rounding only: no overflow, no digits lost below `tiny`."""
    number = float(number)
    limits = torch.finfo(dtype)
    return number == 0 or not math.isfinite(number) or limits.tiny <= abs(number) <= limits.max


def overloads(name: str, operator) -> dict[str, Callable]:
    """The converters of all functional overloads of aten.<name> on tensors."""
    packet = getattr(torch.ops.aten, name)
    schemas = {overload: getattr(packet, overload)._schema for overload in packet.overloads()}
    return {
        f"{name}.{overload}": operator
        for overload, schema in schemas.items()
        if not schema.is_mutable and any(isinstance(x.type, torch.TensorType) for x in schema.arguments)
    }
