"""What the segments of a scheme are, and the tuning tasks whose times add up to each."""

from collections import Counter
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from relax_passes.fusion.operators import ATTENTION, OperatorGraph
from relax_passes.fusion.partition_fusion_groups import Group
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.segment_signature import segment_results, signature
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.schedule.apply_tuning_records import is_unscheduled
from relax_passes.schedule.cpu import cpu_functions
from relax_passes.schedule.cuda import cuda_functions
from stof_tvm.tuning.task import Task, fusion_task, schedule_task


@dataclass(frozen=True)
class Segment:
    """Operators that one scheme has together: the tasks of its kernels, each with how often it runs.

    `predicted_us` is the analytical model's time of all of them.
    """

    tasks: tuple[tuple[Task, int], ...]
    predicted_us: float


class Segments:
    """The segments of one graph; equal ones, such as those of equal layers, are the same object.

    Parameters
    ----------
    graph : OperatorGraph
    chooser : TemplateChooser
        Knows the target and its kernel templates.
    """

    def __init__(self, graph: OperatorGraph, chooser: TemplateChooser):
        self.graph, self.chooser = graph, chooser
        self.model = InitialScheme(chooser)
        self._of_run = {}
        self._of_signature = {}
        self._tasks = {}  # key of a workload -> Task

    def __getitem__(self, run: range) -> Segment:
        """The segment of some operators."""
        if run not in self._of_run:
            key = signature(self.graph, run)
            if key not in self._of_signature:
                self._of_signature[key] = self._segment(run)
            self._of_run[run] = self._of_signature[key]
        return self._of_run[run]

    def tasks(self, scheme: FusionScheme) -> list[tuple[Task, int]]:
        """The different tasks of a scheme, each with how often it runs."""
        counts = Counter()
        for run in scheme.segments:
            for task, count in self[run].tasks:
                counts[task] += count
        return list(counts.items())

    def _segment(self, run: range) -> Segment:
        if self.graph.operators[run.start].kind == ATTENTION:
            return Segment((), 0.0)
        predicted_us = self.model.predict(self.graph, run)
        function = Group(self.graph, run).function(segment_results(self.graph, run))
        choice = self.chooser.choose(function)
        if not isinstance(choice, str):
            tasks = [(fusion_task(choice.match.problem, self.chooser.target, self.chooser.templates), 1)]
        else:
            found = lowered_functions(function, self.chooser.target)
            tasks = [(schedule_task(func, name), count) for name, func, count in found]
        shared = ((self._tasks.setdefault(task.key, task), count) for task, count in tasks)
        return Segment(tuple(shared), predicted_us)


def lowered_functions(function: relax.Function, target: tvm.target.Target) -> list[tuple[str, tirx.PrimFunc, int]]:
    """(name, PrimFunc, number of calls) of what TVM's own rules make of a group, before any schedule."""
    mod = tvm.IRModule({"main": function.with_attr("global_symbol", "main").without_attr("Primitive")})
    passes = cuda_functions() if target.kind.name == "cuda" else cpu_functions()
    with target:
        mod = tvm.transform.Sequential(passes)(mod)
    calls = Counter()
    for block in mod["main"].body.blocks:
        for binding in block.bindings:
            if isinstance(binding.value, relax.Call) and binding.value.op == tvm.ir.Op.get("relax.call_tir"):
                calls[binding.value.args[0].name_hint] += 1
    return [(name, mod[name], count) for name, count in calls.items() if is_unscheduled(mod[name])]
