"""The numbers of a constant as an array, without a copy where NumPy knows the dtype: weights are large."""

import numpy as np
from tvm.ir.expr import GenericConst

SHARED = ("float16", "float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))


def array_of(constant: GenericConst) -> np.ndarray:
    """The elements of a constant, in its shape (…) and dtype; not to be written to."""
    if str(constant.ty.dtype) not in SHARED:
        return constant.value.numpy()
    array = np.from_dlpack(constant.value)
    array.flags.writeable = False
    return array


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
