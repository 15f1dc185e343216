"""The records in lines of a tuning log and the rules that they keep; a broken rule is a ValueError."""

import datetime
import math
from dataclasses import dataclass

from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from tir_kernels.tuning.decisions import TEMPLATE, TRACE


@dataclass(frozen=True)
class Record:
    """One trial of a workload.

    Attributes
    ----------
    decisions : dict
        The decisions, as `tir_kernels.tuning.decisions.decisions_of` gives them.
    us : float or None
        Measured microseconds; None for a failed trial.
    gpu : str
        The name of the GPU, or of the processor, that it ran on.
    reason : str
        Why the trial failed.
    location : str
        Architecture, file and line: "sm_90a/database_tuning_record.json:17".
    trace : list or None
        The trace in JSON form; None for a failed trial.
    """

    decisions: dict
    us: float | None
    gpu: str
    reason: str = ""
    location: str = ""
    trace: list | None = None

    @property
    def valid(self) -> bool:
        return self.us is not None


@dataclass(frozen=True)
class SchemeRecord:
    """The best fusion scheme found for a graph: hexadecimal digits, microseconds of the model, GPU and ISO date.

    Raises ValueError (a SchemeError is one) for values that are no such record.
    """

    scheme: str
    us: float
    gpu: str
    date: str

    def __post_init__(self):
        for name in ("scheme", "gpu", "date"):
            typed(name, getattr(self, name), str)
        checked_time(self.us)
        FusionScheme.parse(self.scheme)
        datetime.date.fromisoformat(self.date)


def typed(name: str, value, kind: type):
    """The value; ValueError unless it is of this very type: True is no int."""
    if type(value) is not kind:
        raise ValueError(f"{name} is {str(value)[:40]!r}, not of type {kind.__name__}")
    return value


def checked_time(value) -> float:
    """A time as a float; ValueError unless it is a positive number."""
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{str(value)[:40]!r} is no time")
    return float(value)


def checked_decisions(decisions) -> dict[str, object]:
    """The decisions; ValueError unless they are a template's name and integers, or a digest."""
    if not isinstance(decisions, dict) or decisions.keys() & {TEMPLATE, TRACE} == set():
        raise ValueError(f"{str(decisions)[:40]!r} are no decisions")
    for name, value in decisions.items():
        typed(f"decision {name!r}", value, str if name in (TEMPLATE, TRACE) else int)
    return decisions
