"""Stage 2 of the search (paper, §3): rounds of trials, each granted to a segment by its reward."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from stof_tvm.tuning.measuring.job import short_reason
from stof_tvm.tuning.measuring.measure import Measurer
from stof_tvm.tuning.measuring.stopwatch import Stopwatch
from stof_tvm.tuning.search.contexts import TaskContext
from stof_tvm.tuning.search.scheduler import Scheduler
from stof_tvm.tuning.task import Task


@dataclass
class Round:
    """Candidates of a segment, being measured."""

    segment: int
    candidates: list  # MeasureCandidates
    futures: list[Future]


class StageTwo:
    """Tunes tasks until a limit.

    Parameters
    ----------
    tasks : list of Task
    context : callable
        Maps a task to its TaskContext.
    deciding : Stopwatch
        Runs while the search decides what to measure next.
    ahead : int
        How many trials are kept under way.  Results are taken in the order in which rounds began, so that the search is
        the same whichever of them finishes first.
    on_trial : callable
        Called with a task, a schedule and its Outcome, in the order of the rounds.
    """

    def __init__(
        self,
        tasks: list[Task],
        context: Callable[[Task], TaskContext],
        measurer: Measurer,
        scheduler: Scheduler,
        deciding: Stopwatch,
        ahead: int,
        on_trial: Callable,
    ):
        self.tasks, self.context, self.measurer, self.scheduler = tasks, context, measurer, scheduler
        self.deciding, self.ahead, self.on_trial = deciding, ahead, on_trial
        self.under_way = deque()
        self.refused = {}  # task -> why it has no candidates

    def run(self, max_trials: int, deadline: float | None = None) -> int:
        """Measure at most `max_trials` candidates, none begun after `deadline` (of `time.perf_counter`).

        Returns how many it began.
        """
        trials = 0
        while True:
            in_time = deadline is None or time.perf_counter() < deadline
            can_start = in_time and trials < max_trials
            has_room = sum(len(round.futures) for round in self.under_way) < self.ahead
            if can_start and has_room and (started := self._start(max_trials - trials)):
                trials += started
            elif self.under_way:
                self._collect(self.under_way.popleft())
            else:
                return trials

    def _start(self, most: int) -> int:
        """Begin a round; returns its number of trials, 0 where no segment has any left."""
        while (segment := self.scheduler.next_segment()) is not None:
            with self.measurer.quiet.work(), self.deciding:
                candidates = self._candidates(self.tasks[segment])[:most]
            if candidates:
                futures = [self.measurer.submit(self.tasks[segment], x.sch) for x in candidates]
                self.under_way.append(Round(segment, candidates, futures))
                return len(candidates)
            self.scheduler.granted[segment] -= 1
            self.scheduler.finish(segment)
        return 0

    def _candidates(self, task: Task) -> list:
        try:
            return self.context(task).candidates()
        except Exception as error:  # MetaSchedule may raise anything where its rules do not cover a function
            self.refused[task] = short_reason(error)
            return []

    def _collect(self, finished: Round) -> None:
        outcomes = self.measurer.wait(finished.futures)
        with self.measurer.quiet.work(), self.deciding:
            self.context(self.tasks[finished.segment]).learn(finished.candidates, outcomes)
            self.scheduler.add_round(finished.segment, [outcome.us for outcome in outcomes])
        for candidate, outcome in zip(finished.candidates, outcomes):
            self.on_trial(self.tasks[finished.segment], candidate.sch, outcome)
