"""Tasks with the strategy that searches them: our sampler, or one of MetaSchedule's."""

import os

import tvm
from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.arg_info import ArgInfo
from tvm.s_tir.meta_schedule.runner import RunnerResult
from tvm.s_tir.meta_schedule.search_strategy import MeasureCandidate

from stof_tvm.tuning.measuring.measure import Outcome
from stof_tvm.tuning.search.sampler import Sampler, SamplerStrategy
from stof_tvm.tuning.task import Task
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.tuning.decisions import decisions_key, decisions_of

MAX_TRIALS = 1 << 20  # the limit given to strategies; the search itself ends them before
BATCH = 4  # candidates in a round of MetaSchedule's strategies, which find a few in the time of one
DRAWS = 16  # rounds of known candidates only that are drawn before a space is taken to be at its end
# For small spaces, in which most combinations of decisions are no legal configuration.
POPULATION = {"population_size": 64, "init_min_unmeasured": 8, "genetic_num_iters": 2, "max_fail_count": 100}


class TaskContext:
    """A task's source of candidates for stage 2; it learns from their outcomes.

    Parameters
    ----------
    context : TuneContext
    cost_model : CostModel of MetaSchedule's, optional
        Needed by strategies that rank candidates by a cost model.
    batch : int
        Number of candidates in a round.
    repeats : bool
        Whether the strategy may propose a candidate twice, as random traces of a small space do; rounds then leave
        repeats out, and are drawn again where nothing else is in them.
    known : list of (Schedule, float)
        Schedules that were measured before, with microseconds: the cost model learns them, and some strategies begin
        with the best.
    """

    def __init__(self, task: Task, context: ms.TuneContext, batch: int, cost_model=None, repeats=False, known=()):
        self.task, self.context, self.cost_model, self.repeats = task, context, cost_model, repeats
        self.proposed = set()  # keys of decisions
        self.arguments = ArgInfo.from_entry_func(task.mod, remove_preproc=True)
        self.database = ms.database.MemoryDatabase()
        self.workload = self.database.commit_workload(task.mod)
        self.first = [] if task.spaces else [MeasureCandidate(Schedule(task.mod), self.arguments)]
        if known:
            self._keep(
                [MeasureCandidate(schedule, self.arguments) for schedule, _ in known],
                [RunnerResult([us / 1e6], None) for _, us in known],
            )
        with quick_script():
            context.pre_tuning(MAX_TRIALS, batch, database=self.database, cost_model=cost_model)

    def candidates(self) -> list[MeasureCandidate]:
        """The next round's candidates, none at the end; a PrimFunc's default schedule is a round by itself."""
        if self.first:
            return [self.first.pop()]
        for _ in range(DRAWS):
            found = list(self.context.generate_measure_candidates() or [])
            if not self.repeats:
                return found
            if new := [candidate for candidate in found if self._is_new(candidate)]:
                return new
        return []

    def _is_new(self, candidate: MeasureCandidate) -> bool:
        key = decisions_key(decisions_of(candidate.sch.trace))
        is_new = key not in self.proposed
        self.proposed.add(key)
        return is_new

    def learn(self, candidates: list[MeasureCandidate], outcomes: list[Outcome]) -> None:
        """Tell the strategy and its cost model the outcomes of candidates."""
        # Without the default schedule, which MetaSchedule did not propose: it takes every result for one of its own.
        pairs = [(x, y) for x, y in zip(candidates, outcomes) if self.task.spaces or x.sch.trace.insts]
        if not pairs:
            return
        own = [candidate for candidate, _ in pairs]
        results = [RunnerResult(None if x.us is None else [x.us / 1e6], x.reason or None) for _, x in pairs]
        self.context.notify_runner_results(own, results)
        self._keep(own, results)

    def _keep(self, candidates: list[MeasureCandidate], results: list[RunnerResult]) -> None:
        if self.cost_model is None:
            return
        self.cost_model.update(self.context, candidates, results)
        for candidate, result in zip(candidates, results):
            if result.run_secs is not None:
                self.database.commit_tuning_record(
                    ms.database.TuningRecord(
                        candidate.sch.trace, self.workload, result.run_secs, self.context.target, self.arguments
                    )
                )


def sampler_context(task: Task, sampler: Sampler, target) -> TaskContext:
    """The context of a template's task with our sampler."""
    keep = ms.space_generator.ScheduleFn(lambda sch: [sch], sch_rules=[], postprocs=[], mutator_probs={})
    return TaskContext(task, tune_context(task, target, keep, SamplerStrategy(sampler), seed=1), batch=1)


def rules_context(task: Task, target, seed: int, cost_model=None) -> TaskContext:
    """A PrimFunc's context: MetaSchedule's rules and evolutionary search, or random traces without a cost model."""
    context = tune_context(task, target, "post-order-apply", strategy_with(cost_model), seed)
    return TaskContext(task, context, BATCH, cost_model, repeats=cost_model is None)


def strategy_with(cost_model) -> ms.search_strategy.PySearchStrategy:
    """MetaSchedule's evolutionary search, or random traces without a cost model."""
    if cost_model is None:
        return ms.search_strategy.ReplayTrace()
    return ms.search_strategy.EvolutionarySearch(**POPULATION)


def tune_context(task: Task, target, space, strategy, seed: int) -> ms.TuneContext:
    """MetaSchedule's context of a task on this machine's processors."""
    config = dict(target.export())
    cores = len(os.sched_getaffinity(0))
    if target.kind.name == "llvm":
        config["num-cores"] = cores
    import_intrinsics()
    with quick_script():
        return ms.TuneContext(
            task.mod,
            target=tvm.target.Target(config),
            space_generator=space,
            search_strategy=strategy,
            task_name=task.name,
            rand_state=seed + 1,  # must be at least 1
            num_threads=cores,
        )


def import_intrinsics() -> None:
    """Import what every tuning context needs: 248 TVMScript functions, which take some seconds the first time."""
    with quick_script():
        import tvm.s_tir.tensor_intrin  # noqa: F401
