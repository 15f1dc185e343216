"""The numbers of constants as arrays: shared where NumPy knows the dtype; and their largest magnitude."""

import ml_dtypes
import numpy as np
import pytest
from tvm import relax

from relax_passes.ir.constant_arrays import array_of, constant_of, largest_magnitude

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64", "int64", "int8", "bool"])
def test_arrays_of_constants(dtype):
    numbers = np.array([[1, 0, -3], [2, 1, 0]]).astype(dtype)
    found = array_of(relax.const(numbers, numbers.dtype.name))
    assert found.dtype == numbers.dtype and np.array_equal(found, numbers)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int64", "bool"])
def test_constants_of_arrays(dtype):
    numbers = np.array([[1, 0, -3], [2, 1, 0]], "float32").T
    constant = constant_of(numbers, dtype)
    assert constant.ty.dtype == dtype and np.array_equal(array_of(constant), numbers.astype(dtype))
    numbers[:] = 7
    assert array_of(constant)[0, 1] != 7


@pytest.mark.parametrize("dtype", ["float16", "float32", "int64"])
def test_arrays_share_the_constant_and_are_not_to_be_written_to(dtype):
    constant = relax.const(np.ones((2, 3), dtype), dtype)
    found = array_of(constant)
    assert np.shares_memory(found, array_of(constant))
    with pytest.raises(ValueError, match="read-only"):
        found[0, 0] = 2
    del constant
    assert found.sum() == 6


@pytest.mark.parametrize("dtype", ["float16", BFLOAT16, "float32", "float64"])
@pytest.mark.parametrize(
    "numbers, largest",
    [
        ([1.5, -2.5, 0.25], 2.5),
        ([-0.0], 0.0),
        ([], 0.0),
        ([2**-14], 2**-14),
        ([1.0, np.inf], np.inf),
        ([-np.inf], np.inf),
        ([1.0, np.nan, 3.0], np.inf),
        ([-np.nan], np.inf),
    ],
)
def test_largest_magnitudes(numbers, largest, dtype):
    array = np.array(numbers, np.float64).astype(dtype)
    assert largest_magnitude(array) == largest
    assert largest_magnitude(np.broadcast_to(array, (2, *array.shape))) == largest


def test_largest_magnitudes_of_other_arrays():
    assert largest_magnitude(np.array([[3, -7], [2, 1]])) == 7
    assert largest_magnitude(np.array([np.iinfo(np.int64).min])) == 2.0**63
    assert largest_magnitude(np.array([[3, -7], [2, 1]], "float16").T) == 7
    assert largest_magnitude(np.float16(-4).reshape(())) == 4
