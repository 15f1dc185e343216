"""The ranks that build and run one engine, or share an attention, and how they learn that one of them failed.

After each step of a build, and before the first exchange of a kind, every rank sends every other one a short status.
All ranks make the same exchanges, of statuses and of data, in the same order, and count them.  A rank that fails tells
the others so with the number of the exchange that it does not come to.  There they are, or will be, and end with its
message.
"""

import contextlib
import datetime
import functools
import os
import weakref
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from stof_tvm.parallel.graphs import end_with
from stof_tvm.parallel.statuses import Statuses
from tir_kernels.errors import InputError, ParallelError

TIMEOUT = "STOF_PARALLEL_TIMEOUT"  # seconds that a rank waits for the others' statuses
DEFAULT_TIMEOUT = 600.0
NAMING = 5.0  # seconds in which a rank answers that is not gone, after something failed
LOOK = datetime.timedelta(seconds=1)  # between two looks whether another rank failed, while data is waited for
LONGEST = 2500  # characters of a message
AFTER_FAILURE = "a call after one that failed"

P = ParamSpec("P")
R = TypeVar("R")


class Peers:
    """The ranks of a process group, seen from one of them.

    Attributes
    ----------
    rank, count : int
        This process's number in the group, and how many there are.
    at : int
        How many exchanges, of statuses and of data, and failures there were: on all ranks the same.

    Raises ParallelError where another rank does not come.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)  # one that is destroyed takes its threads, files and store with it
        self.rank, self.count = dist.get_rank(group), dist.get_world_size(group)
        self.seconds = timeout_seconds()
        self.at = 0
        self._begun = 0  # exchanges of data
        self._calls = 0
        self._depth = 0  # calls in one another
        self._failed = False  # whether the latest call failed here, and maybe here alone
        try:
            self._statuses = Statuses(group, self.rank, self.count, self.seconds)
        except Exception as error:  # of the group, of the store or of gloo
            raise ParallelError(
                f"rank {self.rank}: the {self.count} ranks did not meet ({TIMEOUT}={self.seconds:g}): {error}"
            ) from error
        weakref.finalize(group, self._statuses.close).atexit = False

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group; ParallelError once it is destroyed."""
        group = self._group()
        if group is None:
            raise ParallelError(f"rank {self.rank}: the process group was destroyed: build or call with the new one")
        return group

    def end_with(self, program: Callable) -> None:
        """Drop a program's CUDA graph, if it has one, when the group ends.  Raises nothing."""
        end_with(self.group, program)

    def step(self, name: str, compute: Callable[[], R], told: Callable[[R], dict] = lambda result: {}) -> R:
        """The result of `compute`, once every rank has one.

        `told(result)` is compared among the ranks: what must be the same on all, in short values of JSON by what they
        are.  Raises what `compute` raises; on the other ranks ParallelError with that message, as where a rank is gone
        or told otherwise.
        """
        with self.in_step():
            result = compute()
            for rank, what, _, _ in self._differences(name, told(result)):
                raise ParallelError(
                    f"rank {rank} does not build what rank 0 builds ({name}): it has another {what}. Give every rank "
                    "the same model, weights, inputs and masks"
                )
            return result

    def agree(self, name: str, told: dict) -> None:
        """Return where all ranks do `name` and `told` is the same on all: short values of JSON by what they are.

        Raises ParallelError where a rank means something else, failed or is gone.
        """
        with self.in_step():
            for rank, what, here, there in self._differences(name, told):
                raise ParallelError(
                    f"rank {rank} calls with {what} {here}, rank 0 with {there}: all ranks must mean the same ({name})"
                )

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A call that all ranks make together; others are told of an error that ends it here.

        After a call that failed here, ranks first ask one another whether it failed on all.  Where it did, such as for
        an input that none can take, they go on.  Where others still wait in it, this rank would answer them with what
        belongs to its next call, and all would get wrong numbers: that is a ParallelError.
        """
        is_outermost = not self._depth
        self._depth += 1
        self._calls += is_outermost
        try:
            if is_outermost and self._failed:
                self._ask_after_failure()
            yield
        except BaseException as error:
            if is_outermost:
                self._tell(error)
            raise
        finally:
            self._depth -= 1

    def collective(self, name: str, on_cpu: bool, start: Callable[[bool], dist.Work | None]) -> None:
        """Take part in an exchange of data: `start(async_op)` begins a collective of torch.distributed.

        Raises ParallelError where it fails, and where another rank failed before it.
        """
        with self.answering(name):
            self.begin()
            work = start(on_cpu)
            if on_cpu and work is not None:
                self.wait(work, name, on_cpu)

    def begin(self) -> None:
        """Count an exchange of data that begins now."""
        self.at += 1
        self._begun += 1

    def wait(self, work: dist.Work, name: str, on_cpu: bool) -> None:
        """Wait for data, on the stream, or on CPUs for the other ranks: ParallelError where one failed before."""
        while on_cpu:
            try:
                work.wait(LOOK)
                return
            except RuntimeError:
                if work.is_completed():  # it failed, or its data came since
                    break
            self._look(name)
        work.wait()

    @contextlib.contextmanager
    def answering(self, name: str) -> Iterator[None]:
        """Within the context, ParallelError where the collective `name` fails: who is gone, and torch's words."""
        try:
            yield
        except Exception as error:  # gloo's and NCCL's, of no common type
            if isinstance(error, ParallelError):
                raise
            raise ParallelError(f"rank {self.rank}: {name} failed, {self._whose_fault(name, error)}") from error

    def _whose_fault(self, name: str, error: Exception) -> str:
        """Which ranks are gone and what the others saw, after a collective failed; ParallelError where one told why."""
        seen = "" if isinstance(error, _OthersFailedError) else f"{error}"[:LONGEST]
        statuses = self._statuses.exchange({"at": self.at, "name": name, "seen": seen}, NAMING)
        self._raise_told(statuses, name)
        gone = [str(rank) for rank, status in enumerate(statuses) if status is None]
        who = "rank " + " and ".join(gone) + " is gone or does not answer" if gone else "all ranks are there"
        others = [(rank, status.get("seen")) for rank, status in enumerate(statuses) if status is not None]
        return "; ".join([who, *(f"rank {rank} saw: {text}" for rank, text in others if text)])

    def _look(self, name: str) -> None:
        """ParallelError where another rank failed, or sends a status where this one waits for data."""
        notes = self._statuses.notes(self.at)
        self._raise_told([notes.get(rank) for rank in range(self.count)], name)
        for rank, note in notes.items():
            if note["at"] == self.at and "seen" in note:
                raise _OthersFailedError(f"it failed on rank {rank}")
            if note["at"] == self.at:
                raise ParallelError(f"rank {rank} is in {note['name']}, rank {self.rank} in {name}: {_SAME_CALLS}")

    def _ask_after_failure(self) -> None:
        """Return where all ranks are at the same place after a call that failed; else ParallelError."""
        told = {"call": self._calls, "exchange of data": self._begun}
        for rank, what, here, there in self._differences(AFTER_FAILURE, told):
            raise ParallelError(
                f"rank {rank} is at {what} {here} of this group, rank 0 at {there}: a call failed on some ranks only, "
                "and what is sent next would be taken for another call's. Make a new process group"
            )
        self._failed = False

    def _differences(self, name: str, told: dict) -> Iterator[tuple[int, str, object, object]]:
        """(rank, what, its value, rank 0's value) of what ranks told otherwise; ParallelError where one failed."""
        self.at += 1
        own = {"at": self.at, "name": name, "told": told}
        statuses = self._statuses.exchange(own, self.seconds)
        self._raise_told(statuses, name)
        for rank, status in enumerate(statuses):
            if status is None:
                raise ParallelError(
                    f"rank {self.rank}: rank {rank} is gone, or did not answer within {self.seconds:g} s ({name}); "
                    f"{TIMEOUT} sets the seconds"
                )
        found = [status for status in statuses if status is not None]
        for rank, status in enumerate(found):
            if status["name"] != name or status["at"] != self.at:
                raise ParallelError(f"rank {rank} is in {status['name']}, rank {self.rank} in {name}: {_SAME_CALLS}")
        for rank, status in enumerate(found):
            for what in sorted({*found[0]["told"], *status["told"]}):
                here, there = status["told"].get(what), found[0]["told"].get(what)
                if here != there:
                    yield rank, what, here, there

    def _raise_told(self, statuses: list[dict | None], name: str) -> None:
        """ParallelError with the message of a rank that failed here or later; first one that did not hear it itself."""
        errors = [
            (status["heard"], rank, status["error"])
            for rank, status in enumerate(statuses)
            if status is not None and "error" in status and status["at"] >= self.at
        ]
        if errors:
            heard, rank, error = min(errors)
            raise ParallelError(error if heard else f"rank {rank} failed ({name}): {error}")

    def _tell(self, error: BaseException) -> None:
        """Tell the other ranks of an error that ends a call here."""
        heard = isinstance(error, ParallelError)  # the others hear it, too
        self._failed = True
        # What failed here alone the others find where they next wait for this rank.
        self.at += not heard
        text = (str(error) if heard else f"{type(error).__name__}: {error}")[:LONGEST]
        with contextlib.suppress(Exception):
            self._statuses.tell({"at": self.at, "error": text, "heard": heard})
            if not heard and isinstance(error, Exception):
                self._statuses.wait_for_notes(self.at, NAMING)  # this process may end now, and the store be its own


class _OthersFailedError(RuntimeError):
    """A collective that waits here failed on another rank."""


_SAME_CALLS = "all ranks must make the same calls, in the same order"


def peers_of(mesh, name: str = "mesh") -> Peers:
    """The Peers of a mesh of one dimension or a process group; the same object for the same group.

    Raises InputError, which has the argument's name, for anything else.
    """
    return _peers_of(group_of(mesh, name))


_known: weakref.WeakKeyDictionary[dist.ProcessGroup, Peers] = weakref.WeakKeyDictionary()
_never_met: weakref.WeakKeyDictionary[dist.ProcessGroup, str] = weakref.WeakKeyDictionary()


def _peers_of(group: dist.ProcessGroup) -> Peers:
    if group in _never_met:
        # A rank that came too late may be in that call still, and would take this one's keys for those of its own.
        raise ParallelError(f"{_never_met[group]}. Make a new process group: this one's ranks may be at other calls")
    if group not in _known:
        try:
            _known[group] = Peers(group)
        except ParallelError as error:
            _never_met[group] = str(error)
            raise
    return _known[group]


def among_ranks(build: Callable[P, R]) -> Callable[P, R]:
    """A decorator for `build`: with `mesh` or `context_parallel`, the other ranks are told of any error that ends it.

    What is neither a mesh nor a group `build` refuses itself.
    """

    @functools.wraps(build)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        name = "mesh" if kwargs.get("context_parallel") is None else "context_parallel"
        ranks = kwargs.get(name)
        if not isinstance(ranks, DeviceMesh | dist.ProcessGroup):
            return build(*args, **kwargs)
        with peers_of(ranks, name).in_step():
            return build(*args, **kwargs)

    return told


def step_of(
    peers: Peers | None, name: str, compute: Callable[[], R], told: Callable[[R], dict] = lambda result: {}
) -> R:
    """`peers.step(name, compute, told)`, or without peers just `compute()`."""
    return compute() if peers is None else peers.step(name, compute, told)


def group_of(mesh, name: str = "mesh") -> dist.ProcessGroup:
    """The process group of a mesh of one dimension, or the group itself; InputError for anything else."""
    if not isinstance(mesh, DeviceMesh | dist.ProcessGroup):
        raise InputError(f"{name} is a DeviceMesh of one dimension or a ProcessGroup, got {type(mesh).__name__}")
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise InputError(f"{name} has {mesh.ndim} dimensions: take one of them, as mesh['name'] does")
        if mesh.get_coordinate() is None:
            raise InputError("this process is no rank of the mesh")
        return mesh.get_group()
    check_not_destroyed(mesh)
    if dist.get_rank(mesh) < 0:
        raise InputError("this process is no rank of the process group")
    return mesh


def check_not_destroyed(group: dist.ProcessGroup) -> None:
    """InputError for a group that torch.distributed no longer knows."""
    try:
        dist.get_rank(group)
    except ValueError:
        raise InputError("the process group was destroyed: make a new one") from None


def timeout_seconds() -> float:
    """The seconds that a rank waits for the others' statuses."""
    given = os.environ.get(TIMEOUT)
    try:
        seconds = DEFAULT_TIMEOUT if given is None else float(given)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise InputError(f"{TIMEOUT}={given} is no number of seconds")
    return seconds
