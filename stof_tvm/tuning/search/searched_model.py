"""The kernels that a model runs, and the sum of their times."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stof_tvm.tuning.task import Task

Kernels = tuple[tuple[Task, int], ...]  # tasks that run together, each with how often the model runs it


@dataclass(frozen=True)
class KernelChoice:
    """One computation of the model: its `alternatives` compute the same, and the fastest of them counts."""

    alternatives: tuple[Kernels, ...]

    def us(self, us_of: Callable[[Task], float | None]) -> float | None:
        """Microseconds of the fastest alternative; None where each one has a task whose time is not known."""
        known = []
        for kernels in self.alternatives:
            times = [(us_of(task), count) for task, count in kernels]
            if all(us is not None for us, _ in times):
                known.append(sum(us * count for us, count in times if us is not None))
        return min(known, default=None)


@dataclass(frozen=True)
class SearchedModel:
    """Everything that a model computes, in order."""

    choices: tuple[KernelChoice, ...] = ()

    @classmethod
    def of(cls, kernels: Iterable[tuple[Task, int]]) -> "SearchedModel":
        """A model that runs these tasks, each as often as given, without alternatives."""
        return cls(tuple(KernelChoice(((kernel,),)) for kernel in kernels))

    @property
    def kernels(self) -> list[tuple[Task, int]]:
        """The tasks of all alternatives, each with how often it runs."""
        return [kernel for choice in self.choices for kernels in choice.alternatives for kernel in kernels]

    def us(self, us_of: Callable[[Task], float | None]) -> float | None:
        """The sum of the microseconds of all choices; None while one of them is not known."""
        total = 0.0
        for choice in self.choices:
            us = choice.us(us_of)
            if us is None:
                return None
            total += us
        return total
