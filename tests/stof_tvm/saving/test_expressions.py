"""Expressions of sizes in JSON and back."""

import json

import pytest
import sympy
from torch.utils._sympy import functions as of

from stof_tvm.errors import ArtifactError
from stof_tvm.saving.expressions import dump_expression, load_expression

s, t = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
SIZES = [
    *(3, 2.5, True, s, 2 * s + 1, s * t, s**2, -s, s - t, sympy.Rational(1, 3) * s, sympy.Float(0.1) * s),
    *(of.FloorDiv(s + 3, 4), of.Mod(s, 2), of.PythonMod(s, -3), of.Max(s, t), of.Min(s, 3)),
    *(of.ToFloat(s), of.FloatTrueDiv(1.0, of.ToFloat(s)), of.IntTrueDiv(s, t), of.OpaqueUnaryFn_sqrt(of.ToFloat(s))),
    *(sympy.Eq(of.Mod(s, 2), 0), sympy.Ne(s, t), s < t, sympy.And(s < t, s > 3), sympy.Or(s < 2, t >= s)),
    *(sympy.true, sympy.false, sympy.Symbol("u0", integer=True)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_comes_back(size):
    made = load_expression(json.loads(json.dumps(dump_expression(size))))
    assert made == size and type(made) is type(size)
    if isinstance(size, sympy.Basic):
        assert made.free_symbols == size.free_symbols


@pytest.mark.parametrize("size", [sympy.sin(s), sympy.Function("f")(s), sympy.Symbol("x y") + 1, "s0", None])
def test_what_cannot_be_stored(size):
    with pytest.raises((ArtifactError, ValueError)):
        dump_expression(size)


@pytest.mark.parametrize(
    "made",
    [None, "s0", [], {}, ["Symbol"], ["Symbol", "__import__('os')"], ["Symbol", "s0", "real"], ["eval", "1"], [["Add"]]]
    + [["FloorDiv", 1], ["Integer", "1"], ["Symbol", 3], ["true", 1]],
    ids=str,
)
def test_what_is_no_expression(made):
    with pytest.raises((ValueError, TypeError)):
        load_expression(made)
