"""The state of a search: samplers, contexts and best times of tasks, and how the model's latency follows from them."""

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tvm.s_tir import Schedule
from tvm.s_tir import meta_schedule as ms

from stof_tvm.tuning.logs.log import TuningLog
from stof_tvm.tuning.measuring.measure import Measurer, Outcome
from stof_tvm.tuning.measuring.stopwatch import Stopwatch
from stof_tvm.tuning.search.contexts import TaskContext, rules_context, sampler_context
from stof_tvm.tuning.search.cost_model import THREADS, CostModel
from stof_tvm.tuning.search.reward import Reward, Shares
from stof_tvm.tuning.search.sampler import Sampler, schedule_of
from stof_tvm.tuning.search.scheduler import Scheduler
from stof_tvm.tuning.search.searched_model import SearchedModel
from stof_tvm.tuning.search.stage_two import StageTwo
from stof_tvm.tuning.task import Task, choice_of
from tir_kernels.tuning.decisions import decisions_of

__all__ = ["Options", "Trial"]

AHEAD = (
    1.5  # candidates under way for each compiling process, so that none is idle while the oldest round is waited for
)


@dataclass(frozen=True)
class Options:
    """Which parts of the search are switched on.  The defaults won the measurements; other values are for ablations.

    Attributes
    ----------
    defaults : bool
        Measure the choices of a build without logs first.  Otherwise they are measured at the end, only for comparison,
        and do not count as trials.
    stage_one : bool
        Search the fusion scheme; otherwise the analytical one stays.
    reward : callable
        Makes the rewards by which segments get trials: `reward.Reward`, or another class with its `shares`.
    cost_model : bool
        Rank candidates by the cost model; otherwise they are drawn at random.
    cache : bool
        Take times that the log holds instead of measuring again.
    strategy : callable, optional
        Replaces the sampler for tasks of templates.  Called with a task, a target, a seed, a callable that gives
        MetaSchedule's cost model or None, and a list of (Schedule, microseconds) measured before; returns a
        TaskContext.
    samples : int
        Configurations of a segment that stage 1 measures to judge a move.
    max_moves : int
        How many moves stage 1 measures at most.
    """

    defaults: bool = True
    stage_one: bool = True
    reward: Callable[[], Shares] = Reward
    cost_model: bool = True
    cache: bool = True
    strategy: Callable[..., TaskContext] | None = None
    samples: int = 4
    max_moves: int = 64


@dataclass
class TaskState:
    """What is known of a task: its best time, the default's time and the number of trials."""

    task: Task
    sampler: Sampler | None
    best_us: float | None = None
    default_us: float | None = None
    trials: int = 0
    failures: dict[str, int] = field(default_factory=dict)  # reason -> number
    context: TaskContext | None = None

    @functools.cached_property
    def default(self) -> dict:
        """The decisions that a build without logs takes."""
        if self.task.default is not None:
            space, config = self.task.default
            return space.decisions_for(config)
        return decisions_of(Schedule(self.task.mod).trace)


@dataclass(frozen=True)
class Trial:
    """One measured candidate; trials are numbered in the order in which the search heard of them.

    `seconds` counts from the start of the search.  `model_us` is the sum of the best times of the model's kernels at
    that moment, None while one of them has no time yet.
    """

    number: int
    seconds: float
    task: str
    us: float | None
    reason: str
    is_cached: bool
    model_us: float | None


class Search:
    """What both stages share: tasks with their samplers and times, and the trials.

    Parameters
    ----------
    log : TuningLog
    measurer : Measurer
    options : Options
    seed : int
    max_trials : int
        Most trials of both stages together.
    on_trial : callable
        Called with every Trial.

    Attributes
    ----------
    model : SearchedModel
        The kernels that the model runs, for the sum of their times.
    deciding : Stopwatch
        Runs while the search decides what to measure next: cost model, encoding of candidates, rewards.
    """

    def __init__(
        self,
        log: TuningLog,
        measurer: Measurer,
        options: Options,
        seed: int,
        max_trials: int,
        on_trial: Callable[[Trial], None] = lambda trial: None,
    ):
        self.log, self.measurer, self.options, self.seed = log, measurer, options, seed
        self.max_trials, self.on_trial = max_trials, on_trial
        self.cost_model = CostModel(seed)
        self.rules_model = None  # MetaSchedule's, made when it is needed
        self.states = {}  # key of a task -> TaskState
        self.model = SearchedModel()
        self.trials = []
        self.under_way = []  # (task, schedule, future) of stage 1
        self.deciding = Stopwatch()
        self.started = time.perf_counter()

    # -- tasks -----------------------------------------------------------------------------------------------------

    def state(self, task: Task) -> TaskState:
        """The state of a task, including what the log holds."""
        if task.key not in self.states:
            with self.deciding:
                self.states[task.key] = self._state(task)
        return self.states[task.key]

    def _state(self, task: Task) -> TaskState:
        model = self.cost_model if self.options.cost_model else None
        state = TaskState(task, Sampler(task, model, self.seed) if task.spaces else None)
        for record in self.measurer.records(task):
            if state.sampler is None or state.sampler.recall(record.decisions, record.us):
                self._take_in(state, record.decisions, Outcome(record.us, record.reason))
        return state

    def latency_us(self) -> float | None:
        """The model's latency, the sum of its kernels' best times; None while one has no time yet."""
        return self.model.us(lambda task: self.state(task).best_us)

    # -- measuring -------------------------------------------------------------------------------------------------

    def begin(self, tasks: Iterable[Task], samples: int = 1) -> None:
        """Start measuring tasks until each has `samples` measured configurations, the default first."""
        for task in dict.fromkeys(tasks):
            state = self.state(task)
            missing = samples - state.trials - sum(task is other for other, _, _ in self.under_way)
            missing = min(missing, self.max_trials - len(self.trials) - len(self.under_way))
            with self.deciding:
                if state.sampler is not None:
                    wanted = [schedule_of(task, *candidate) for candidate in state.sampler.propose(missing)]
                else:
                    wanted = [schedule_of(task)] if missing > 0 and not self.measurer.has(task, state.default) else []
            self.under_way += [(task, schedule, self.measurer.submit(task, schedule)) for schedule in wanted]

    def measure_defaults(self, tasks: Iterable[Task]) -> None:
        """Measure the tasks' defaults, which a build without logs takes; they do not count as trials."""
        different = dict.fromkeys(tasks)
        defaults = [(self.state(task), schedule_of(task, *task.default)) for task in different if task.default]
        futures = [self.measurer.submit(state.task, schedule) for state, schedule in defaults]
        for (state, _), outcome in zip(defaults, self.measurer.wait(futures)):
            state.default_us = outcome.us

    def rank_ahead(self) -> None:
        """Predict the times of all candidates of the tasks under way, by which they are ranked later.

        Called while measurements run.  If these take longer, the prediction cost no time and is not counted as
        deciding.
        """
        watch = Stopwatch()
        with watch:
            for task, _, _ in self.under_way:
                if (sampler := self.state(task).sampler) is not None:
                    sampler.predict()
        if all(future.done() for _, _, future in self.under_way):
            self.deciding.seconds += watch.seconds

    def wait(self) -> None:
        """Wait until everything that `begin` started is measured."""
        under_way, self.under_way = self.under_way, []
        outcomes = self.measurer.wait([future for _, _, future in under_way])
        for (task, schedule, _), outcome in zip(under_way, outcomes):
            if (sampler := self.state(task).sampler) is not None:
                sampler.learn(*choice_of(task, schedule.trace), outcome.us)
            self._record(task, schedule, outcome)

    def tune(self, tasks: list[tuple[Task, int]], deadline: float | None) -> None:
        """Run stage 2 on tasks, each given with how often the model runs it."""
        scheduler = Scheduler(self.options.reward(), [count for _, count in tasks], self.seed)
        for (task, _), segment in zip(tasks, scheduler.segments):
            state = self.state(task)
            segment.best_us, segment.trials = state.best_us, state.trials
        context = lambda task: self._context(self.state(task))
        ahead = math.ceil(AHEAD * self.measurer.parallel)
        parts = self.measurer, scheduler, self.deciding, ahead, self._record
        stage = StageTwo([task for task, _ in tasks], context, *parts)
        stage.run(self.max_trials - len(self.trials), deadline)
        for task, reason in stage.refused.items():
            self.state(task).failures[reason] = 1

    def _context(self, state: TaskState) -> TaskContext:
        if state.context is None:
            target, task = self.log.target, state.task
            if state.sampler is None:
                # On a GPU these kernels are few and small: together they get fewer trials than the model needs to
                # learn.
                model = None if target.kind.name == "cuda" else self._rules_model()
                state.context = rules_context(task, target, self.seed, model)
            elif self.options.strategy is None:
                state.context = sampler_context(task, state.sampler, target)
            else:
                known = []
                if task.default is not None and state.default_us is not None:
                    known = [(schedule_of(task, *task.default), state.default_us)]
                state.context = self.options.strategy(task, target, self.seed, self._rules_model, known)
        return state.context

    def _rules_model(self):
        """MetaSchedule's cost model, one for all tasks that its own strategies search."""
        if self.rules_model is None and self.options.cost_model:
            self.rules_model = ms.cost_model.XGBModel(num_tuning_cores=THREADS)
        return self.rules_model

    def _record(self, task: Task, schedule: Schedule, outcome: Outcome) -> None:
        self._take_in(self.state(task), decisions_of(schedule.trace), outcome)
        seconds = time.perf_counter() - self.started
        trial = Trial(
            len(self.trials) + 1,
            seconds,
            task.name,
            outcome.us,
            outcome.reason,
            outcome.is_cached,
            self.latency_us(),
        )
        self.trials.append(trial)
        self.on_trial(trial)

    @staticmethod
    def _take_in(state: TaskState, made: dict, outcome: Outcome) -> None:
        state.trials += 1
        if outcome.us is None:
            state.failures[outcome.reason] = state.failures.get(outcome.reason, 0) + 1
            return
        state.best_us = outcome.us if state.best_us is None else min(state.best_us, outcome.us)
        if made == state.default:
            state.default_us = outcome.us
