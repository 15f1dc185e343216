"""Functions that TorchDynamo calls between two graphs, instead of tracing them."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

AT_ONCE = "what a mask keeps is computed at once, with NumPy; of a mask that stays the same, do so before the function"

P = ParamSpec("P")
R = TypeVar("R")


def between_graphs(reason: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that does what `torch.compiler.disable` does, but imports TorchDynamo, for a second, only with it.

    `reason` is told where torch.compile must not break a graph.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        untraced: list[Callable[P, R]] = []

        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if "torch._dynamo" not in sys.modules:  # so nothing is compiled by it
                return function(*args, **kwargs)
            if not untraced:
                untraced.append(torch.compiler.disable(function, reason=reason))
            return untraced[0](*args, **kwargs)

        # Without these, TorchDynamo traces the line above, and tells of torch.compiler.disable instead of the reason.
        called._torchdynamo_disable = True  # type: ignore[attr-defined]
        called._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
        return called

    return decorated
