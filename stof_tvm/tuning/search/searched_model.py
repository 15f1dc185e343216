"""What a model runs, for the sum of its kernels' times."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stof_tvm.tuning.task import Task

Kernels = tuple[tuple[Task, int], ...]  # tasks that run together, each with how often the model runs it


@dataclass(frozen=True)
class Part:
    """A part of the model: `alternatives` compute the same, and the fastest of them counts."""

    alternatives: tuple[Kernels, ...]

    def us(self, us_of: Callable[[Task], float | None]) -> float | None:
        """Microseconds by the times of tasks; None where each alternative has a task without."""
        known = []
        for kernels in self.alternatives:
            times = [(us_of(task), count) for task, count in kernels]
            if all(us is not None for us, _ in times):
                known.append(sum(us * count for us, count in times if us is not None))
        return min(known, default=None)


@dataclass(frozen=True)
class SearchedModel:
    """All parts of a model, in order."""

    parts: tuple[Part, ...] = ()

    @classmethod
    def of(cls, kernels: Iterable[tuple[Task, int]]) -> "SearchedModel":
        """A model that runs these tasks, each so often, without alternatives."""
        return cls(tuple(Part(((kernel,),)) for kernel in kernels))

    @property
    def kernels(self) -> list[tuple[Task, int]]:
        """The tasks of all parts and alternatives, each with how often it runs."""
        return [kernel for part in self.parts for kernels in part.alternatives for kernel in kernels]

    def us(self, us_of: Callable[[Task], float | None]) -> float | None:
        """The sum of the parts' microseconds; None while there is a part without."""
        total = 0.0
        for part in self.parts:
            us = part.us(us_of)
            if us is None:
                return None
            total += us
        return total
