"""A product between copies, as it is in a model: one writes its rows before it, and one reads its result after it.

A GPU that multiplies without a pause is at its power limit, where other tiles are the fastest than in models, and the
rows of a product that is timed alone are never in the cache.
"""

import functools
import statistics
from collections.abc import Callable, Sequence

import torch

from benchmarks.peers.timing import device_samples_us


class Between:
    """Copies before and after each of some products, and their own time.

    `rows` are the first operands of the products, which take turns; `result` is like what each gives, but where it
    gives more elements, of which so many are read.  `us` are the microseconds of both copies, without a product.
    """

    def __init__(self, rows: Sequence[torch.Tensor], result: torch.Tensor, device: str = "cuda"):
        self.rows, self.sources = rows, [x.clone() for x in rows]
        self.kept = torch.empty_like(result)
        nothing = [lambda: None] * len(rows)
        made = torch.zeros_like(result)
        self.us = statistics.median(device_samples_us(self.around(nothing, [made] * len(rows)), device))

    def around(self, calls: Sequence[Callable], results: Sequence[torch.Tensor] = ()) -> list[Callable]:
        """The calls, each with its copies; without `results`, calls return theirs."""

        def run(source, rows, call, result=None):
            rows.copy_(source)
            made = call()
            result = made if result is None else result
            self.kept.copy_(result.flatten()[: self.kept.numel()].view_as(self.kept))

        each = zip(self.sources, self.rows, calls, *([results] if results else []))
        return [functools.partial(run, *one) for one in each]
