"""The operators that NumPy computes to the last bit: of integers and truth values, and those that move elements.

A row of `OPERATORS` is (parameters, compute): `parameters(call)` are the numbers beside the operands, hashable, and
`compute(parameters, *arrays)` is the result, or None where NumPy's might be another one.  Arithmetic and comparisons of
floats are not among them: compiled code may round a product and a sum at once, and has its own way with NaN.
"""

from collections.abc import Callable

import numpy as np

from relax_passes.ir.bindings import permutation, static_shape

OF_INTEGERS: dict[str, Callable] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "minimum": np.minimum,
    "maximum": np.maximum,
    "abs": np.abs,
    "negative": np.negative,
}
OF_TRUTHS: dict[str, Callable] = {
    **dict.fromkeys(("logical_and", "bitwise_and"), np.logical_and),
    **dict.fromkeys(("logical_or", "bitwise_or"), np.logical_or),
    **dict.fromkeys(("logical_not", "bitwise_not"), np.logical_not),
}
COMPARISONS: dict[str, Callable] = {
    "less": np.less,
    "less_equal": np.less_equal,
    "greater": np.greater,
    "greater_equal": np.greater_equal,
    "equal": np.equal,
    "not_equal": np.not_equal,
}


def _elementwise(function: Callable, kinds: str) -> tuple[Callable, Callable]:
    """The row of a function of operands of one dtype, which is of some of NumPy's kinds.

    Of two dtypes compiled code compares what both become, NumPy the numbers.
    """

    def compute(_parameters, *arrays):
        is_one = len({array.dtype for array in arrays}) == 1
        return function(*arrays) if is_one and arrays[0].dtype.kind in kinds else None

    return _nothing, compute


def _nothing(_call) -> tuple:
    return ()


def _axis(call) -> int | None:
    return None if call.attrs.axis is None else int(call.attrs.axis)


def _range(call) -> tuple | None:
    numbers = [getattr(argument, "value", None) for argument in call.args]
    return tuple(numbers) if all(isinstance(n, int) for n in numbers) else None


def _arange(numbers):
    return None if numbers is None else np.arange(*numbers, dtype=np.int64)


def _slices(call) -> tuple | None:
    """(axis, first, end, step) of each axis that is cut."""
    lists: list[list] = [[getattr(n, "value", None) for n in getattr(x, "fields", [None])] for x in call.args[1:]]
    axes, first, end, steps = lists if len(lists) == 4 else [*lists, [1] * len(lists[0])]
    is_known = all(isinstance(n, int) for numbers in lists for n in numbers) and min(steps, default=1) > 0
    return tuple(zip(axes, first, end, steps, strict=True)) if is_known else None


def _strided_slice(cut, x):
    if cut is None:
        return None
    index = [slice(None)] * x.ndim
    for axis, first, end, step in cut:
        index[axis] = slice(first, end, step)
    return x[tuple(index)]


def _are_inside(places, length: int) -> bool:
    return places.dtype.kind in "iu" and bool(((places >= 0) & (places < length)).all())


def _take(axis, x, places):
    if axis is None:
        return None
    return np.take(x, places, axis) if _are_inside(places, x.shape[axis]) else None


def _gather_elements(axis, x, places):
    fits = all(n <= m for i, (n, m) in enumerate(zip(places.shape, x.shape)) if i != axis % x.ndim)
    if not fits or not _are_inside(places, x.shape[axis]):
        return None
    index = list(np.ogrid[tuple(map(slice, places.shape))])
    index[axis] = places
    return x[tuple(index)]


def _cast(dtype: str, x):
    """To and from truth values and integers; floats would need the processor's rounding of what is too large."""
    return x.astype(dtype) if x.dtype.kind in "biu" and dtype in WHOLE else None


def _cumsum(parameters, x):
    axis, is_exclusive = parameters
    return None if is_exclusive or x.dtype.kind not in "iu" else np.cumsum(x, axis, dtype=x.dtype)


WHOLE = ("bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))  # dtypes
OPERATORS: dict[str, tuple[Callable, Callable]] = {
    **dict.fromkeys(("reshape", "expand_dims", "squeeze", "flatten"), (static_shape, lambda to, x: x.reshape(to))),
    "broadcast_to": (static_shape, lambda to, x: np.broadcast_to(x, to)),
    **{name: _elementwise(function, "iu") for name, function in OF_INTEGERS.items()},
    **{name: _elementwise(function, "b") for name, function in OF_TRUTHS.items()},
    **{name: _elementwise(function, "biu") for name, function in COMPARISONS.items()},
    "where": (_nothing, lambda _, condition, x, y: np.where(condition, x, y) if condition.dtype == bool else None),
    "arange": (_range, _arange),
    "strided_slice": (_slices, _strided_slice),
    "concat": (_axis, lambda axis, *arrays: np.concatenate(arrays, axis)),
    "permute_dims": (lambda call: tuple(permutation(call)), lambda axes, x: x.transpose(axes)),
    "take": (_axis, _take),
    "gather_elements": (_axis, _gather_elements),
    "astype": (lambda call: str(call.attrs.dtype), _cast),
    "cumsum": (lambda call: (_axis(call), bool(call.attrs.exclusive)), _cumsum),
}
