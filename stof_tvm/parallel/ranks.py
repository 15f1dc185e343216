"""The ranks that build and run one engine, or share an attention, and how they learn that one of them failed.

After each step of a build, and before the first exchange of a kind, every rank sends every other one a short status,
over a gloo group of its own with a timeout: so a failed rank ends all with its message, and one that is gone is named.
"""

import contextlib
import datetime
import functools
import json
import os
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tir_kernels.errors import InputError, ParallelError

TIMEOUT = "STOF_PARALLEL_TIMEOUT"  # seconds that a rank waits for the others' statuses
DEFAULT_TIMEOUT = 600.0
NAMING = 5.0  # seconds in which a rank answers that is not gone, after something failed
STATUS_BYTES = 16384
LONGEST = 2500  # characters of a message

R = TypeVar("R")


class Peers:
    """The ranks of a process group, seen from one of them.

    Attributes
    ----------
    group : ProcessGroup
    rank, count : int
        This process's number in the group, and how many there are.

    Raises ParallelError where another rank does not come.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.seconds = timeout_seconds()
        self._global = dist.get_process_group_ranks(self.group)
        self._failed = False  # whether the latest call failed here, and maybe here alone
        try:
            self._status = dist.new_group(
                self._global,
                timeout=datetime.timedelta(seconds=self.seconds),
                backend="gloo",
                use_local_synchronization=True,
            )
        except Exception as error:  # of the store or of gloo
            raise ParallelError(
                f"rank {self.rank}: not all {self.count} ranks came within {self.seconds:g} s ({TIMEOUT}): {error}"
            ) from error

    def step(self, name: str, compute: Callable[[], R], told: Callable[[R], object] = lambda result: None) -> R:
        """The result of `compute`, once every rank has one.

        `told(result)` is compared among the ranks: a short value, of JSON, that must be the same on all.  Raises what
        `compute` raises; on the other ranks ParallelError with that message, as where a rank is gone or told otherwise.
        """
        try:
            result = compute()
            own: dict = {"told": told(result)}
        except ParallelError:  # the others know
            raise
        except BaseException as error:
            self._exchange({"error": f"{type(error).__name__}: {error}"[:LONGEST]})
            raise
        statuses = self._statuses(name, own)
        for rank, status in enumerate(statuses):
            if status["told"] != statuses[0]["told"]:
                raise ParallelError(
                    f"rank {rank} does not build what rank 0 builds ({name}): {status['told']!r} is not "
                    f"{statuses[0]['told']!r}. Give every rank the same model, weights, inputs and masks"
                )
        return result

    def agree(self, name: str, meant: str, error: Exception | None = None) -> None:
        """Return where all ranks do `name` and mean the same by it, and none has an error.

        With an error of its own a rank raises that; the others ParallelError with its message, as where a rank means
        something else or is gone.
        """
        if error is not None:
            self._exchange({"error": f"{type(error).__name__}: {error}"[:LONGEST]})
            raise error
        statuses = self._statuses(name, {"told": meant})
        for rank, status in enumerate(statuses):
            if status["told"] != statuses[0]["told"]:
                raise ParallelError(
                    f"rank {rank} calls with {status['told']}, rank 0 with {statuses[0]['told']}: all ranks must mean "
                    "the same"
                )

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """A call that all ranks make together: after one that failed here, they first ask whether it failed on all.

        Where it did, such as for an input that none can take, they go on.  Where it failed on one rank alone, the
        others still wait in it.  This rank would answer them with what belongs to its next call, and all would get
        wrong numbers: it is a ParallelError.
        """
        if self._failed:
            self.agree("a call after one that failed", "a call after one that failed")
        try:
            yield
        except BaseException:
            self._failed = True
            raise

    @contextlib.contextmanager
    def answering(self, name: str) -> Iterator[None]:
        """Within the context, ParallelError where the collective `name` fails: who is gone, and torch's words."""
        try:
            yield
        except Exception as error:  # gloo's and NCCL's, of no common type
            if isinstance(error, ParallelError):
                raise
            raise ParallelError(f"rank {self.rank}: {name} failed, {self._whose_fault()}: {error}") from error

    def _whose_fault(self) -> str:
        """Which ranks are gone, after a collective failed here."""
        statuses = self._exchange({}, NAMING)
        gone = [str(rank) for rank, status in enumerate(statuses) if status is None]
        return "rank " + " and ".join(gone) + " is gone or does not answer" if gone else "all ranks are there"

    def _statuses(self, name: str, own: dict) -> list[dict]:
        """The statuses of all ranks; ParallelError where one is missing, or an error."""
        statuses: list[dict] = []
        for rank, status in enumerate(self._exchange(own)):
            if status is None:
                raise ParallelError(
                    f"rank {self.rank}: rank {rank} is gone, or did not answer within {self.seconds:g} s ({name}); "
                    f"{TIMEOUT} sets the seconds"
                )
            statuses.append(status)
        for rank, status in enumerate(statuses):
            if "error" in status:
                raise ParallelError(f"rank {rank} failed ({name}): {status['error']}")
        return statuses

    def _exchange(self, status: dict, seconds: float | None = None) -> list[dict | None]:
        """The status of every rank, None for those that are gone or later than `seconds`."""
        data = json.dumps(status).encode().ljust(STATUS_BYTES)
        if len(data) > STATUS_BYTES:
            raise InputError(f"a status of {len(data)} bytes is longer than {STATUS_BYTES}")
        sent = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        found: list[dict | None] = [status if rank == self.rank else None for rank in range(self.count)]
        others = [rank for rank in range(self.count) if rank != self.rank]
        received = {rank: torch.empty_like(sent) for rank in others}
        works = {}
        for rank in others:
            peer = self._global[rank]
            try:
                sending = dist.isend(sent, peer, group=self._status)
                works[rank] = dist.irecv(received[rank], peer, group=self._status), sending
            except RuntimeError:  # gone
                continue
        for rank, pair in works.items():
            try:
                for work in pair:
                    if work is not None:  # None is for processes outside of the group
                        work.wait(datetime.timedelta(seconds=seconds or self.seconds))
            except RuntimeError:  # gone or too late
                continue
            found[rank] = json.loads(received[rank].numpy().tobytes())
        self._failed &= None in found  # what answers is at the same place
        return found


def peers_of(mesh, name: str = "mesh") -> Peers:
    """The Peers of a mesh of one dimension or a process group; the same object for the same group.

    Raises InputError, which has the argument's name, for anything else.
    """
    return _peers_of(group_of(mesh, name))


@functools.cache
def _peers_of(group: dist.ProcessGroup) -> Peers:
    return Peers(group)


def step_of(
    peers: Peers | None, name: str, compute: Callable[[], R], told: Callable[[R], object] = lambda result: None
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
    if dist.get_rank(mesh) < 0:
        raise InputError("this process is no rank of the process group")
    return mesh


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
