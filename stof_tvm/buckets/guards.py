"""What torch.export demands of sizes, besides their ranges, as expressions that a file can hold.

torch.export has it as texts of Python, such as `(L['x'].size()[1] % 2) == 0`.
"""

import ast
import operator
from collections.abc import Mapping
from typing import Any

import sympy
from torch.utils._sympy import functions

from stof_tvm.frontend.shape_range import ShapeRange
from stof_tvm.saving.expressions import KNOWN
from tir_kernels.errors import ArtifactError

COMPARED: Mapping[type, Any] = {
    ast.Eq: sympy.Eq,
    ast.NotEq: sympy.Ne,
    ast.Lt: sympy.Lt,
    ast.LtE: sympy.Le,
    ast.Gt: sympy.Gt,
    ast.GtE: sympy.Ge,
}
COMPUTED: Mapping[type, Any] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: functions.FloorDiv,
    ast.Mod: functions.PythonMod,
    ast.Pow: lambda a, b: a**b,
}
CONSTANTS: Mapping[type, Any] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}
FUNCTIONS: Mapping[str, Any] = {"max": functions.Max, "min": functions.Min}


class _Tensor:
    """An input of a program: only its sizes are known."""

    def __init__(self, shape: tuple):
        self.shape = shape


def guard_expressions(shapes: ShapeRange) -> tuple[tuple[Any, str], ...]:
    """(an expression that must hold, its text) for each guard of a program.

    Raises ArtifactError for one that is more than arithmetic and comparisons of sizes.
    """
    if shapes.guards is not None and shapes.guard_texts is None:
        raise ArtifactError("this version of PyTorch does not tell what an exported program demands of its inputs")
    args, kwargs = shapes.signature.nest_inputs([_Tensor(shape) for shape in shapes.shapes])
    inputs = dict(zip(shapes.signature.names, [*args, *kwargs.values()], strict=True))
    found = []
    for text in shapes.guard_texts or ():
        try:
            holds = _value(ast.parse(text, mode="eval").body, inputs)
        except Exception as error:
            raise ArtifactError(f"what torch.export demands of the inputs cannot be stored: {text}") from error
        if holds in (False, sympy.false):
            raise ArtifactError(f"what torch.export demands of the inputs holds for none: {text}")
        if holds not in (True, sympy.true):
            found.append((holds, text))
    return tuple(found)


def _value(node: ast.expr, inputs: Mapping[str, Any]):
    """What an expression is of the inputs' sizes; any exception where it is something else."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id="L"):
            return inputs
        case ast.Subscript(value=value, slice=index):
            return _value(value, inputs)[_value(index, inputs)]
        case ast.Call(func=ast.Attribute(value=value, attr="size"), args=[], keywords=[]):
            return _value(value, inputs).shape
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return (FUNCTIONS.get(name) or KNOWN[name])(*(_value(x, inputs) for x in args))
        case ast.BinOp(left=left, op=op, right=right):
            return COMPUTED[type(op)](_value(left, inputs), _value(right, inputs))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, inputs)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return sympy.Not(_value(operand, inputs))
        case ast.BoolOp(op=op, values=values):
            return (sympy.And if isinstance(op, ast.And) else sympy.Or)(*(_value(x, inputs) for x in values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            terms = [_value(x, inputs) for x in (left, *others)]
            if any(isinstance(x, str) or x is None for x in terms):  # constants, which a signature compares
                return all(CONSTANTS[type(op)](a, b) for op, a, b in zip(ops, terms, terms[1:]))
            return sympy.And(*(COMPARED[type(op)](a, b) for op, a, b in zip(ops, terms, terms[1:])))
    raise ValueError(ast.dump(node))
