"""Expressions of sizes as JSON: SymPy's and PyTorch's functions from a closed list.

A number is itself, a symbol ["Symbol", its name, …], a function [its name, arguments …].  SymPy's own reader evaluates
what a text says, whatever that is.
"""

from typing import Any

import sympy
from torch.utils._sympy import functions

from tir_kernels.errors import ArtifactError

OF_SYMPY = (
    *("Add", "Mul", "Pow", "Rational", "Abs", "Piecewise", "floor", "ceiling"),
    *("Equality", "Unequality", "LessThan", "GreaterThan", "StrictLessThan", "StrictGreaterThan", "And", "Or", "Not"),
)
OF_PYTORCH = (
    *("FloorDiv", "CleanDiv", "CeilDiv", "Mod", "PythonMod", "ModularIndexing", "LShift", "RShift", "Max", "Min"),
    *("PowByNatural", "FloatPow", "FloatTrueDiv", "IntTrueDiv", "ToFloat", "TruncToFloat", "TruncToInt", "RoundToInt"),
    *("RoundDecimal", "CeilToInt", "FloorToInt", "Where", "Identity", "OpaqueUnaryFn_sqrt", "OpaqueUnaryFn_log"),
    *("OpaqueUnaryFn_exp", "OpaqueUnaryFn_log2", "OpaqueUnaryFn_cos", "OpaqueUnaryFn_sin", "OpaqueUnaryFn_tanh"),
)
KNOWN: dict[str, Any] = {
    **{name: getattr(sympy, name) for name in OF_SYMPY},
    **{name: getattr(functions, name) for name in OF_PYTORCH if hasattr(functions, name)},
}
ASSUMPTIONS = ("integer", "positive", "nonnegative")  # of PyTorch's symbols
TRUE, FALSE = "true", "false"


def dump_expression(value) -> Any:
    """A number or an expression of SymPy as JSON; ArtifactError where `load_expression` would not take it."""
    made = _dumped(value)
    if load_expression(made) != value:
        raise ArtifactError(f"the size {value} cannot be stored")
    return made


def load_expression(made) -> Any:
    """The inverse of `dump_expression`.  ValueError for JSON that it did not return."""
    if type(made) in (int, float, bool):
        return made
    if not isinstance(made, list) or not made or not isinstance(made[0], str):
        raise ValueError(f"{str(made)[:40]} is no expression")
    name, *rest = made
    if name == "Symbol":
        symbol, *held = rest
        if not isinstance(symbol, str) or not symbol.isidentifier() or not {*held} <= {*ASSUMPTIONS}:
            raise ValueError(f"{str(symbol)[:40]!r} is no symbol")
        return sympy.Symbol(symbol, **dict.fromkeys(held, True))
    if name in ("Integer", "Float") and len(rest) == 1 and type(rest[0]) in (int, float):
        return sympy.Integer(rest[0]) if name == "Integer" else sympy.Float(rest[0])
    if name in (TRUE, FALSE) and not rest:
        return sympy.true if name == TRUE else sympy.false
    if name not in KNOWN:
        raise ValueError(f"{name[:40]!r} is no function of sizes")
    try:
        return KNOWN[name](*map(load_expression, rest))
    except ValueError:
        raise
    except Exception as error:  # SymPy may raise anything for arguments that do not fit
        raise ValueError(f"{name} does not take {str(rest)[:40]}: {error}") from None


def _dumped(value) -> Any:
    if type(value) in (int, float, bool):
        return value
    if isinstance(value, sympy.Symbol):
        return ["Symbol", value.name, *(name for name in ASSUMPTIONS if value.assumptions0.get(name))]
    if isinstance(value, sympy.Integer):
        return ["Integer", int(value)]
    if isinstance(value, sympy.Rational):
        return ["Rational", int(value.p), int(value.q)]
    if isinstance(value, sympy.Float):
        return ["Float", float(value)]
    if value in (sympy.true, sympy.false):
        return [TRUE if value == sympy.true else FALSE]
    name = type(value).__name__
    if KNOWN.get(name) is not type(value):
        raise ArtifactError(f"a size of the model is {value}, in which {name} cannot be stored")
    return [name, *map(_dumped, value.args)]
