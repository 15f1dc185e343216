"""Formulas in Relax: every operation bound to a variable, Python numbers as constants of the dtype at hand."""

from tvm import relax

HALF = ("float16", "bfloat16")


class Formulas:
    """`f.multiply(2.0, f.exp(x))` emits both operators of relax.op (or relax.op.nn), 2.0 as a constant of `dtype`.

    Parameters
    ----------
    context : stof_tvm.frontend.importer.Context
        Where to emit.
    dtype : str
        The operands' dtype, which constants get.
    """

    def __init__(self, context, dtype: str):
        self.context = context
        self.dtype = dtype

    def __getattr__(self, name):
        operator = getattr(relax.op, name, None) or getattr(relax.op.nn, name)
        return lambda *operands: self.context.emit(operator(*map(self.operand, operands)))

    def operand(self, value) -> relax.Expr:
        return value if isinstance(value, relax.Expr) else relax.const(value, self.dtype)

    def cast(self, x, dtype: str) -> relax.Expr:
        """`x` cast to `dtype`; `x` itself if it has that dtype."""
        return x if str(x.ty.dtype) == dtype else self.context.emit(relax.op.astype(x, dtype))

    @property
    def is_float(self) -> bool:
        return "float" in self.dtype

    @property
    def is_unsigned(self) -> bool:
        return self.dtype.startswith("uint")

    @property
    def bits(self) -> int:
        return int("".join(c for c in self.dtype if c.isdigit()))

    def not_equal(self, x, y):
        """In LLVM code for Relax's own not_equal, NaN equals everything."""
        if not self.is_float:
            return self.context.emit(relax.op.not_equal(self.operand(x), self.operand(y)))
        return self.logical_not(self.equal(x, y))

    def isnan(self, x):
        """Relax's own isnan, extended to bfloat16 and integers."""
        if not self.is_float:
            return self.context.emit(relax.op.not_equal(x, x))
        return self.context.emit(relax.op.isnan(self.cast(x, "float32") if str(x.ty.dtype) == "bfloat16" else x))

    def any(self, *conditions):
        return _joined(self.logical_or, conditions)

    def all(self, *conditions):
        return _joined(self.logical_and, conditions)


def _joined(operator, conditions):
    result = conditions[0]
    for condition in conditions[1:]:
        result = operator(result, condition)
    return result
