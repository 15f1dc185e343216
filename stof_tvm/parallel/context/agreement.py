"""Ranks tell one another, before the first exchange of a kind, that all can do it and mean the same."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from tir_kernels.errors import ParallelError

NAMING = timedelta(seconds=5)  # for finding out which ranks are gone
TAG = 0x57F  # of the bytes that ask


def agree(group, meant: str, error: Exception | None = None) -> None:
    """Return where all ranks of a group call with the same `meant`, and none with an error.

    With an error of its own a rank raises that; ParallelError where another rank has one, means something else, or does
    not answer within the group's timeout.
    """
    told: list = [None] * dist.get_world_size(group)
    try:
        with answering(group):
            dist.all_gather_object(told, (meant, None if error is None else _text(error)), group=group)
    except ParallelError:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    failed = [f"rank {rank} failed: {why}" for rank, (_, why) in enumerate(told) if why is not None]
    if failed:
        raise ParallelError("; ".join(failed))
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise ParallelError(
                f"rank {rank} calls with {other}, rank 0 with {told[0][0]}: all ranks must mean the same"
            )


@contextlib.contextmanager
def answering(group) -> Iterator[None]:
    """Within the context, ParallelError where ranks of the group do not answer: torch's words, and which do not."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, ParallelError):
            raise
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        raise ParallelError(f"rank {rank} of {ranks} had no answer: {_text(error)}{_missing(group)}") from error


def _missing(group) -> str:
    """Which ranks do not answer any more: each is asked for a byte.  Only gloo can be asked after an error."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return ""
    rank, asked = dist.get_rank(group), {}
    for other in range(dist.get_world_size(group)):
        if other != rank:
            asked[other] = _asked(dist.get_global_rank(group, other), group)
    silent = [str(other) for other, pending in asked.items() if not all(map(_is_answered, pending))]
    return f"; no answer of rank {', '.join(silent)}" if silent else ""


def _asked(other: int, group) -> list:
    """A byte to a rank and one from it, on their way; None in place of what fails at once."""
    pending: list = []
    for move in (dist.isend, dist.irecv):
        try:
            pending.append(move(torch.zeros(1, dtype=torch.uint8), other, group=group, tag=TAG))
        except RuntimeError:
            pending.append(None)
    return pending


def _is_answered(pending) -> bool:
    try:
        return pending is not None and pending.wait(NAMING)
    except RuntimeError:
        return False


def _text(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
