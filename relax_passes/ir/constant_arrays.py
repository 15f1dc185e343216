"""The numbers of a constant as an array, without a copy where NumPy knows the dtype: weights are large."""

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

SHARED = ("float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
ALIGNMENT = 64  # bytes; compiled code takes it for granted


def array_of(constant: GenericConst) -> np.ndarray:
    """The elements of a constant, in its shape (…) and dtype; not to be written to."""
    if str(constant.ty.dtype) not in SHARED:
        return constant.value.numpy()
    array = np.from_dlpack(constant.value)
    array.flags.writeable = False
    return array


def constant_of(array: np.ndarray, dtype: str) -> GenericConst:
    """A constant with the elements of an array (…) in `dtype`, copied once: `relax.const` copies an array twice."""
    return relax.const(tvm.runtime.tensor(array.astype(dtype, copy=False)))


def largest_magnitude(array: np.ndarray) -> float:
    """The largest absolute value of an array (…) of any float dtype; inf if there is a NaN, 0 without elements."""
    if array.size == 0:
        return 0.0
    if array.dtype.name in ("float16", "bfloat16") and array.flags.c_contiguous:
        # Without its sign, a half-precision number is larger where its bits are, and a NaN is larger than infinity.
        bits = (array.reshape(-1).view(np.uint16) & np.uint16(0x7FFF)).max()
        largest = float(np.asarray(bits, np.uint16).view(array.dtype))
    else:
        largest = float(np.abs(array if array.dtype == np.float32 else array.astype(np.float64)).max())
    return np.inf if np.isnan(largest) else largest


def with_aligned(value: relax.Expr, copies: dict[GenericConst, relax.Expr]) -> relax.Expr:
    """The expression of a binding, of any shapes and dtypes, with copies of constants that are not aligned.

    Those are a file's that is mapped into memory.  `copies` has the copies made so far.
    """
    if isinstance(value, relax.Tuple):
        fields = [with_aligned(field, copies) for field in value.fields]
        return value if _same(fields, value.fields) else relax.Tuple(fields)
    if isinstance(value, relax.Call):
        arguments = [with_aligned(argument, copies) for argument in value.args]
        if _same(arguments, value.args):
            return value
        return relax.Call(value.op, arguments, value.attrs, value.ty_args, value.span)
    if not isinstance(value, GenericConst) or not isinstance(value.value, tvm.runtime.Tensor):
        return value
    if value.value.data_ptr() % ALIGNMENT == 0:
        return value
    if value not in copies:
        copies[value] = relax.const(value.value.numpy(), str(value.ty.dtype))
    return copies[value]


def _same(new, old) -> bool:
    return all(a is b or a.same_as(b) for a, b in zip(new, old, strict=True))
