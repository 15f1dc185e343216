"""One thread at a time compiles: what compiling goes through keeps its state in places that all threads share.

torch.export patches PyTorch, as TVMScript's quick start patches `inspect`; Relax's block builders stand on one stack;
and CPython 3.11's own parser fails where two threads parse at once ("AST constructor recursion depth mismatch").
"""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

COMPILING = threading.RLock()  # the same thread may take it again


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which other threads wait for."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with COMPILING:
            return function(*args, **kwargs)

    return alone
