"""Checks of the arguments of mask constructors, and arrays that compare by value."""

import hashlib
import operator
import reprlib

import numpy as np
import torch

from stof_tvm.running.has_data import has_data, without_data
from tir_kernels.errors import InputError, MaskError

LARGEST = 2**62  # far above any length; arithmetic with offsets stays within int64


def check_int(name: str, value, least: int = 0, largest: int = LARGEST) -> int:
    """The value as an int; MaskError unless it is an integer of at least `least` and at most `largest`."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise MaskError(f"{name}={reprlib.repr(value)} must be an integer of at least {least}")
    if number > largest:
        raise MaskError(f"{name}={reprlib.repr(value)} must be at most {largest}")
    return number


def check_flag(name: str, value) -> bool:
    """The value as a bool; MaskError unless it is True or False, of Python or of NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise MaskError(f"{name}={reprlib.repr(value)} must be True or False")
    return bool(value)


def as_number(name: str, value) -> float:
    """The value as a float; InputError unless it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor that is not one real number
        raise InputError(f"{name} must be a number, got {type(value).__name__} {reprlib.repr(value)}") from None


def check_ints(name: str, values, least: int = 0) -> tuple[int, ...]:
    """A list, tuple, range, set, array or tensor of integers as a tuple; MaskError names the first bad element."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        values = values.tolist()
    if not isinstance(values, (list, tuple, range, set, frozenset)):
        raise MaskError(f"{name}={reprlib.repr(values)} must be a sequence of integers")
    return tuple(check_int(f"{name}[{k}]", value, least) for k, value in enumerate(values))


def check_indices(name: str, values) -> tuple[int, ...]:
    """A set of non-negative indices as an ascending tuple without repetitions."""
    return tuple(sorted(set(check_ints(name, values))))


def without_repeats(array: np.ndarray) -> np.ndarray:
    """A view in which each dimension that repeats elements (stride 0, as `expand` makes it) has size 1."""
    return array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]


class ArrayKey:
    """The key of a boolean array: its shape and a digest of its contents, not the array itself."""

    def __init__(self, shape: tuple[int, ...], digest: str):
        self.shape, self.digest = shape, digest

    def __eq__(self, other):
        return isinstance(other, ArrayKey) and self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)

    def __repr__(self):
        return f"<bool {'×'.join(map(str, self.shape))} {self.digest[:8]}>"


class FixedArray:
    """A boolean array, read only, and its `key`."""

    def __init__(self, array: np.ndarray):
        once = without_repeats(array).copy()
        self.array = np.broadcast_to(once, array.shape)
        shapes = repr((array.shape, once.shape)).encode()
        self.key = ArrayKey(array.shape, hashlib.sha256(shapes + np.packbits(once).tobytes()).hexdigest())


def as_numpy(name: str, values) -> np.ndarray:
    """A tensor, array or nested list as a NumPy array on the CPU, copied only if necessary."""
    if isinstance(values, torch.Tensor):
        given = values.detach()
        values = given if given.is_meta else given.cpu()
        if not has_data(values):
            raise MaskError(f"{without_data(name, values)}: a mask is made of values")
        # NumPy has no bfloat16; float32 holds every bfloat16 value.
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    try:
        return np.asarray(values)
    except ValueError:
        raise MaskError(f"{name} must be a tensor or an array, got {type(values).__name__}") from None
