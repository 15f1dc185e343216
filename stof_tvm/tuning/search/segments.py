"""The tuning tasks of each segment, whose times add up to the segment's."""

from collections import Counter
from dataclasses import dataclass

import tvm
from tvm import relax, tirx

from relax_passes.fusion.operators import ATTENTION, OperatorGraph
from relax_passes.fusion.partition_segments import SegmentContents
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.segment_signature import segment_key, segment_results
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.schedule.apply_tuning_records import is_unscheduled
from relax_passes.schedule.cpu import cpu_functions
from relax_passes.schedule.cuda import cuda_functions
from stof_tvm.tuning.task import Task, fusion_task, schedule_task


@dataclass(frozen=True)
class SegmentTasks:
    """The kernels of a segment: their tasks, each with how often it runs.

    `predicted_us` is the analytical model's time of all of them.
    """

    tasks: tuple[tuple[Task, int], ...]
    predicted_us: float


class Segments:
    """Maps a segment of one graph to its SegmentTasks; equal segments, as equal layers have, give the same object.

    Parameters
    ----------
    graph : OperatorGraph
    chooser : TemplateChooser
        Knows the target and its kernel templates.
    """

    def __init__(self, graph: OperatorGraph, chooser: TemplateChooser):
        self.graph, self.chooser = graph, chooser
        self.model = InitialScheme(chooser)
        self._known = {}
        self._by_signature = {}
        self._tasks = {}  # key of a workload -> Task

    def __getitem__(self, segment: range) -> SegmentTasks:
        """The tasks of a segment, the range of its operators."""
        if segment not in self._known:
            key = segment_key(self.graph, segment)
            if key not in self._by_signature:
                self._by_signature[key] = self._segment(segment)
            self._known[segment] = self._by_signature[key]
        return self._known[segment]

    def tasks(self, scheme: FusionScheme) -> list[tuple[Task, int]]:
        """The different tasks of a scheme, each with how often it runs."""
        counts = Counter()
        for segment in scheme.segments:
            for task, count in self[segment].tasks:
                counts[task] += count
        return list(counts.items())

    def _segment(self, segment: range) -> SegmentTasks:
        if self.graph.operators[segment.start].kind == ATTENTION:
            return SegmentTasks((), 0.0)
        predicted_us = self.model.predict(self.graph, segment)
        function = SegmentContents(self.graph, segment).function(segment_results(self.graph, segment))
        choice = self.chooser.choose(function)
        if not isinstance(choice, str):
            tasks = [(fusion_task(choice.match.problem, self.chooser.target, self.chooser.templates), 1)]
        else:
            found = lowered_functions(function, self.chooser.target)
            tasks = [(schedule_task(func, name), count) for name, func, count in found]
        shared = ((self._tasks.setdefault(task.key, task), count) for task, count in tasks)
        return SegmentTasks(tuple(shared), predicted_us)


def lowered_functions(function: relax.Function, target: tvm.target.Target) -> list[tuple[str, tirx.PrimFunc, int]]:
    """(name, PrimFunc, number of calls) of each function that TVM's own rules make of a segment, not yet scheduled."""
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
