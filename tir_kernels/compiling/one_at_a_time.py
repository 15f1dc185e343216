"""A lock that lets one thread at a time compile, because compiling keeps state that all threads share.

torch.export patches PyTorch, and quick_script.py patches `inspect`.  Relax's block builders share one stack.  CPython
3.11's own parser fails if two threads parse at once ("AST constructor recursion depth mismatch").
"""

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

COMPILING = threading.RLock()  # the same thread may take it again


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: while one thread is in `function`, others that call it or another decorated one wait."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with COMPILING:
            return function(*args, **kwargs)

    return alone
