"""Device code that sorts: integers in the order of elements, and how many elements of a run come before another one.

These functions run while a kernel is parsed and write out its code.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.prologue import scalar
from tir_kernels.fusion.rows.statistics import local_buffers
from tir_kernels.fusion.sorting.problem import KEYS

LARGEST = {"int32": 2**31 - 1, "int64": 2**63 - 1}
SINGLE = "float16", "bfloat16", "float32"  # whose order is that of their float32


@T.inline
def assign(buffer, at, value):
    buffer[at] = value


@T.inline
def sync():
    T.cuda.cta_sync()


def key(x, dtype: str, descending: bool):
    """An integer whose order is that of x among elements of a dtype; equal elements have equal keys.

    Bits are compared, because fast math takes small floats for 0 and knows no NaN.
    """
    kind = KEYS[dtype]
    if "float" not in dtype:
        ascending = T.cast(x, kind)
    else:
        bits = scalar("bits", T.reinterpret(kind, T.cast(x, "float32") if dtype in SINGLE else x))
        largest = tirx.const(LARGEST[kind], kind)
        infinity = tirx.const(0x7F800000 if kind == "int32" else 0x7FF0000000000000, kind)
        zero = tirx.const(0, kind)
        magnitude = bits & largest
        # Of negative numbers the larger has the smaller magnitude; -0 is 0.
        ordered = T.Select(bits < zero, T.Select(magnitude == zero, zero, bits ^ largest), bits)
        ascending = T.Select(magnitude > infinity, largest, ordered)
    return ascending ^ tirx.const(-1, kind) if descending else ascending


def comes_before(other, mine, is_earlier):
    """Whether an element with key `other` comes before one with key `mine`, after it in the row unless `is_earlier`."""
    return T.Or(other < mine, T.And(is_earlier, other == mine))


class Run(NamedTuple):
    """A sorted run: its first place, its length, which may be 0, and whether it lies before the element's own run."""

    start: object
    length: object
    is_earlier: object


def add_places(rank, key_at: Callable, mine, runs: Sequence[Run], longest: int) -> None:
    """rank[0] += the number of elements of `runs`, each of up to `longest`, that come before an element of key `mine`.

    `key_at(place)` is a key.  All runs are searched step by step together, so that their loads are under way at once.
    """
    (counts,) = local_buffers("counts", 1, len(runs), "int32")
    for i in range(len(runs)):
        assign(counts, i, T.int32(0))
    for bit in reversed(range(longest.bit_length())):
        ahead = [scalar("ahead", counts[i] + (1 << bit)) for i in range(len(runs))]
        places = [run.start + T.max(T.min(at, run.length) - 1, 0) for run, at in zip(runs, ahead)]
        found = [scalar("other", key_at(place)) for place in places]
        for i, (run, at, other) in enumerate(zip(runs, ahead, found)):
            is_before = T.And(at <= run.length, comes_before(other, mine, run.is_earlier))
            assign(counts, i, T.Select(is_before, at, counts[i]))
    for i in range(len(runs)):
        assign(rank, 0, rank[0] + counts[i])
