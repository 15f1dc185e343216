"""A task with a search strategy of MetaSchedule's, its own or ours, and what the strategy learns from."""

import os

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from stof_tvm.tuning.measure import Outcome
from stof_tvm.tuning.sampler import Sampler, SamplerStrategy
from stof_tvm.tuning.task import Task
from tir_kernels.quick_script import quick_script

MAX_TRIALS = 1 << 20  # of a strategy; the search has limits of its own
POPULATION = {"population_size": 128, "init_min_unmeasured": 16, "genetic_num_iters": 2}


class TaskContext:
    """What stage 2 asks for candidates of a task and tells their outcomes.

    Parameters
    ----------
    context : TuneContext
    cost_model : CostModel of MetaSchedule's, optional
        For strategies that rank by one.
    batch : int
        Candidates of a round.
    """

    def __init__(self, task: Task, context: ms.TuneContext, batch: int, cost_model=None):
        self.task, self.context, self.cost_model = task, context, cost_model
        self.arguments = ArgInfo.from_entry_func(task.mod, remove_preproc=True)
        self.database = ms.database.MemoryDatabase()
        self.workload = self.database.commit_workload(task.mod)
        self.first = [] if task.spaces else [MeasureCandidate(Schedule(task.mod), self.arguments)]
        with quick_script():
            context.pre_tuning(MAX_TRIALS, batch, database=self.database, cost_model=cost_model)

    def candidates(self) -> list[MeasureCandidate]:
        """The next round's; none where the space ends.  A PrimFunc's default schedule is a round of its own."""
        if self.first:
            return [self.first.pop()]
        return list(self.context.generate_measure_candidates() or [])

    def learn(self, candidates: list[MeasureCandidate], outcomes: list[Outcome]) -> None:
        """Tell the strategy and its cost model."""
        # MetaSchedule takes every result that it is told for one of its own.
        pairs = [(x, y) for x, y in zip(candidates, outcomes) if self.task.spaces or x.sch.trace.insts]
        if not pairs:
            return
        candidates, outcomes = zip(*pairs)
        results = [RunnerResult(None if x.us is None else [x.us / 1e6], x.reason or None) for x in outcomes]
        self.context.notify_runner_results(candidates, results)
        if self.cost_model is not None:
            self.cost_model.update(self.context, candidates, results)
            for candidate, result in zip(candidates, results):
                if result.run_secs is not None:
                    self.database.commit_tuning_record(
                        ms.database.TuningRecord(
                            candidate.sch.trace, self.workload, result.run_secs, self.context.target, self.arguments
                        )
                    )


def sampler_context(task: Task, sampler: Sampler, target, batch: int) -> TaskContext:
    """Of a template's task and our sampler."""
    keep = ms.space_generator.ScheduleFn(lambda sch: [sch], sch_rules=[], postprocs=[], mutator_probs={})
    return TaskContext(task, _tune_context(task, target, keep, SamplerStrategy(sampler), seed=1), batch)


def rules_context(task: Task, target, batch: int, seed: int, cost_model=None) -> TaskContext:
    """Of a PrimFunc: MetaSchedule's rules and evolutionary search, or random traces without a cost model."""
    strategy = ms.search_strategy.ReplayTrace()
    if cost_model is not None:
        strategy = ms.search_strategy.EvolutionarySearch(**POPULATION)
    return TaskContext(task, _tune_context(task, target, "post-order-apply", strategy, seed), batch, cost_model)


def _tune_context(task: Task, target, space, strategy, seed: int) -> ms.TuneContext:
    config = dict(target.export())
    cores = len(os.sched_getaffinity(0))
    if target.kind.name == "llvm":
        config["num-cores"] = cores
    with quick_script():  # it imports 248 TVMScript functions
        return ms.TuneContext(
            task.mod,
            target=tvm.target.Target(config),
            space_generator=space,
            search_strategy=strategy,
            task_name=task.name,
            rand_state=seed + 1,  # from 1
            num_threads=cores,
        )
