"""The lengths that prompts are padded to: few engines, little padding."""

from collections.abc import Sequence

from tir_kernels.errors import InputError

STEP = 64  # tokens between two of the shortest buckets
PER_OCTAVE = 4  # buckets between a length and twice that length, from 4 * STEP on


def buckets_to(max_length: int) -> tuple[int, ...]:
    """The default buckets: multiples of STEP, then a quarter octave apart, and `max_length`."""
    found, size = [], STEP
    while size < max_length:
        found.append(size)
        size += max(STEP, (1 << (size.bit_length() - 1)) // PER_OCTAVE)
    return (*found, max_length)


def checked(lengths: Sequence[int] | int, max_length: int) -> tuple[int, ...]:
    """A caller's buckets in order; InputError unless they are numbers from 2 to `max_length`."""
    given = tuple(lengths) if isinstance(lengths, list | tuple | range) else (lengths,)
    if not given or any(type(n) is not int or not 2 <= n <= max_length for n in given):
        raise InputError(f"prompt must have lengths from 2 to max_length={max_length}, got {lengths!r}")
    return tuple(sorted(set(given)))


def bucket_of(length: int, buckets: Sequence[int]) -> int:
    """The least bucket that holds a prompt; InputError where none does."""
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise InputError(f"a prompt has {length} tokens, and the longest that these engines take has {buckets[-1]}")


def least_length(room: int, buckets: Sequence[int]) -> int:
    """How many tokens a prompt has at least that is padded to `room`: it did not fit the bucket before."""
    return max((bucket for bucket in buckets if bucket < room), default=0) + 1
