"""Look-up of tuning records for a model's segments and attentions, for the passes that choose kernels.

Replaying never measures.  A record whose template or configuration this version does not have is skipped, with a note
for the report.
"""

from collections.abc import Iterable, Iterator
from typing import Protocol

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir.schedule import Trace

from tir_kernels.attention.mask_forms import MaskLike
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.errors import InputError
from tir_kernels.tuned_config import TunedConfig
from tir_kernels.tuning.attention_spaces import mask_digest
from tir_kernels.tuning.problem_json import problem_to_json
from tir_kernels.tuning.template_space import from_decisions, misfit
from tir_kernels.tuning.workload import attention_workload, fusion_workload, primfunc_workload

KNOWN = 4096  # problems, with their masks, whose best records are kept in memory


class Log(Protocol):
    """The interface of a tuning log, which holds records of workloads and fusion schemes of operator graphs.

    A record has the fields "decisions", "us", "gpu", "location" and "trace"; a scheme has "scheme", "us", "gpu" and
    "date".
    """

    def ranked(self, workload: tvm.IRModule, gpu: str | None) -> list:
        """The records of a workload: those of this GPU come first, and faster records before slower ones."""

    def may_hold(self, problem: str) -> bool:
        """Whether it may have a workload of a problem, as `problem_to_json` writes it."""

    def scheme(self, key: str, gpu: str | None):
        """The fusion scheme found on this GPU for a graph's key, else the best of another GPU, or None."""


class TunedChoices:
    """The best records of a tuning log that still fit, for one target.

    Records of the GPU named `gpu` go before those of other GPUs.

    Parameters
    ----------
    templates : iterable
        A user's own templates, which records may name.

    Attributes
    ----------
    notes : dict of str
        Why records were skipped, each reason once, in order.
    scheme_in_use
        The record of the scheme that cut the operators, or None where the log has none that fits.
    scheduled : int
        The number of functions that no template computes and that a record scheduled.
    """

    def __init__(self, log: Log, target: tvm.target.Target, gpu: str | None = None, templates: Iterable = ()):
        self.log = log
        self.templates = tuple(templates)
        self.target = target
        self.gpu = gpu
        self.notes = {}
        self.scheme_in_use = None
        self.scheduled = 0
        self._known = {}

    def fusion(self, problem) -> TunedConfig | None:
        """The fastest known kernel of a problem of the fusion templates."""
        if problem not in self._known:
            # Most problems were never tuned, and the workload of one takes a tenth of a second to make.
            tried = self.log.may_hold(problem_to_json(problem))
            self._known[problem] = self._best(problem, fusion_workload(problem)) if tried else None
        return self._known[problem]

    def attention(self, problem: AttentionProblem, mask: MaskLike | None) -> TunedConfig | None:
        """The fastest known kernel of an attention with a mask."""
        if not self.log.may_hold(problem_to_json(problem)):
            return None
        key = problem, mask_digest(problem, mask)
        if key not in self._known:
            while len(self._known) >= KNOWN:  # a serving loop brings new masks all the time
                del self._known[next(iter(self._known))]
            self._known[key] = self._best(problem, attention_workload(*key))
        return self._known[key]

    def schedule(self, function: tvm.tirx.PrimFunc) -> tvm.tirx.PrimFunc | None:
        """A function that no template computes, scheduled by the fastest known MetaSchedule trace that fits.

        None if no trace fits, or if the default schedule was the fastest.
        """
        workload = primfunc_workload(function)
        for record in self.log.ranked(workload, self.gpu):
            if not record.trace[0]:
                return None  # the default schedule was the fastest
            sch = Schedule(workload, debug_mask="none")
            try:
                Trace.apply_json_to_schedule(record.trace, sch)
            except Exception as error:  # TVM raises what it likes for a trace that does not fit
                self.note(f"{record.location} no longer fits: {str(error).strip().splitlines()[-1]}")
                continue
            self.scheduled += 1
            return sch.mod["main"]
        return None

    def scheme(self, key: str):
        """The best known fusion scheme of a graph."""
        return self.log.scheme(key, self.gpu)

    def note(self, text: str) -> None:
        """Have the report say this, once."""
        self.notes[text] = None

    def _best(self, problem, workload) -> TunedConfig | None:
        return next(self._fitting(problem, workload), None)

    def _fitting(self, problem, workload) -> Iterator[TunedConfig]:
        for record in self.log.ranked(workload, self.gpu):
            try:
                template, config = from_decisions(record.decisions, self.templates)
                reason = misfit(template, problem, config, self.target)
            except InputError as error:
                reason = str(error)
            if reason is None:
                yield TunedConfig(template, config, record.us, record.gpu, record.location)
            else:
                self.note(f"{record.location} no longer fits: {reason}")
