"""ExactFloats: float arithmetic is rewritten so that TVM's simplifier does not treat it like integer arithmetic.

The simplifier takes `a == a` for true, `not a < b` for `b <= a`, `a < b or b <= a` for true, `a - a` for 0,
`(a + b) - b` for a, `(c ? a : b) - b` for `c ? a - b : 0` and `0 * a` or `0 / a` for 0, in any dtype; and LLVM's code
for `a != b` is "ordered and not equal".  All of this is wrong for NaN, and most of it for infinities and rounding.  The
pass replaces the left sides by the right sides, which the simplifier leaves alone:

    a == b             a <= b and b <= a
    a == a             a's bits are those of infinity or less
    not c              c ? false : true
    a != b             a == b ? false : true
    a < b or b <= a    a < b | b <= a
    (a + b) - b        reinterpreted(a + b) - b
    (c ? a : b) - b    reinterpreted(c ? a : b) - b        or the larger of a and b
    a - a              reinterpreted(a) - a
    0 / a              reinterpreted(0) / a

Preconditions: after scheduling, before TVM's own lowering.  Changes floats of any precision.
"""

import tvm
import tvm_ffi
from tvm import tirx

from relax_passes.ir.floats import FLOATS, opaque
from relax_passes.ir.mapped_bodies import with_mapped_bodies

# The integer dtype in which bits are compared, and the bits of infinity, below those of NaN.
_INFINITY = {"float16": ("int16", 0x7C00), "float32": ("int32", 0x7F800000), "float64": ("int64", 0x7FF << 52)}
_ORDERED = (tirx.LT, tirx.LE, tirx.GT, tirx.GE)


@tvm.transform.module_pass(opt_level=0, name="ExactFloats")
class ExactFloats:
    """Rewrite these expressions in every schedulable function of a module."""

    def transform_module(self, mod, _ctx):
        return with_mapped_bodies(mod, _CALLBACKS)


def _equal(node):
    if not _is_float(node.a):
        return node
    if str(node.a.ty.dtype) in _INFINITY and tvm_ffi.structural_equal(node.a, node.b):
        return _is_number(node.a)
    return tirx.And(tirx.LE(node.a, node.b), tirx.LE(node.b, node.a))


def _is_number(x):
    """Whether x is no NaN, told by its bits: TVM takes `x <= x` for true where x is computed in place."""
    bits, infinity = _INFINITY[str(x.ty.dtype)]
    magnitude = tirx.bitwise_and(tirx.reinterpret(bits, x), tirx.const((1 << (int(bits[3:]) - 1)) - 1, bits))
    return tirx.LE(magnitude, tirx.const(infinity, bits))


def _not_equal(node):
    return _negated(_equal(node)) if _is_float(node.a) else node


def _not(node):
    return node if _is_of_integers(node.a) else _negated(node.a)


def _or(node):
    both = isinstance(node.a, _ORDERED) and isinstance(node.b, _ORDERED)
    return tirx.bitwise_or(node.a, node.b) if both and _is_float(node.a.a) and _is_float(node.b.a) else node


def _add(node):
    """(a - b) + b and b + (a - b)."""
    if str(node.ty.dtype) not in FLOATS:
        return node
    if _holds(node.a, node.b):
        return tirx.Add(opaque(node.a), node.b)
    return tirx.Add(node.a, opaque(node.b)) if _holds(node.b, node.a) else node


def _subtract(node):
    if str(node.ty.dtype) not in FLOATS:
        return node
    if _holds(node.a, node.b) or tvm_ffi.structural_equal(node.a, node.b):
        return tirx.Sub(opaque(node.a), node.b)
    return tirx.Sub(node.a, opaque(node.b)) if _holds(node.b, node.a) or _share(node.a, node.b) else node


def _divide(node):
    if str(node.ty.dtype) not in FLOATS or not (isinstance(node.a, tirx.FloatImm) and float(node.a) == 0):
        return node
    return tirx.Div(opaque(node.a), node.b)


_CALLBACKS = [
    (tirx.EQ, _equal),
    (tirx.NE, _not_equal),
    (tirx.Not, _not),
    (tirx.Or, _or),
    (tirx.Add, _add),
    (tirx.Sub, _subtract),
    (tirx.Div, _divide),
]


def _is_float(x) -> bool:
    return "float" in str(x.ty.dtype) and "x" not in str(x.ty.dtype)


def _negated(condition):
    return tirx.Select(condition, tirx.const(False, "bool"), tirx.const(True, "bool"))


def _is_of_integers(condition) -> bool:
    """Whether a condition compares integers only, as for the bounds of loops: TVM shall still simplify it."""
    if isinstance(condition, (tirx.And, tirx.Or)):
        return _is_of_integers(condition.a) and _is_of_integers(condition.b)
    if isinstance(condition, (*_ORDERED, tirx.EQ, tirx.NE)):
        return not _is_float(condition.a)
    return isinstance(condition, tirx.Not) and _is_of_integers(condition.a)


def _terms(x) -> list:
    """The terms of x that a difference may cancel: the operands of a sum, and the alternatives of a choice."""
    if isinstance(x, (tirx.Add, tirx.Sub)):
        return [x.a, x.b]
    if isinstance(x, (tirx.Max, tirx.Min)):
        choices = [x.a, x.b]
    elif isinstance(x, tirx.Select):
        choices = [x.true_value, x.false_value]
    elif getattr(getattr(x, "op", None), "name", "") == "prim.if_then_else":
        choices = list(x.args[1:])
    else:
        return []
    return [*choices, *(term for choice in choices for term in _terms(choice))]


def _holds(whole, part) -> bool:
    """Whether a sum, difference or choice has an operand like `part`."""
    return any(tvm_ffi.structural_equal(term, part) for term in _terms(whole))


def _share(a, b) -> bool:
    return any(_holds(b, term) for term in _terms(a))
