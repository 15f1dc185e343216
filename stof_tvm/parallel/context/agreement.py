"""Ranks tell one another, before the first exchange of a kind, that all can do it and mean the same."""

import contextlib
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from tir_kernels.errors import GroupError

NAMING = timedelta(seconds=5)  # for finding out which rank is gone


def agree(group, meant: str, error: Exception | None = None) -> None:
    """Return where all ranks of a group call with the same `meant`, and none with an error.

    With an error of its own a rank raises that; GroupError where another rank has one, means something else, or does
    not answer within the group's timeout.
    """
    told: list = [None] * dist.get_world_size(group)
    try:
        with answering(group):
            dist.all_gather_object(told, (meant, None if error is None else _text(error)), group=group)
    except GroupError:
        if error is not None:
            raise error from None
        raise
    if error is not None:
        raise error
    failed = [f"rank {rank} failed: {why}" for rank, (_, why) in enumerate(told) if why is not None]
    if failed:
        raise GroupError("; ".join(failed))
    for rank, (other, _) in enumerate(told):
        if other != told[0][0]:
            raise GroupError(f"rank {rank} calls with {other}, rank 0 with {told[0][0]}: all ranks must mean the same")


@contextlib.contextmanager
def answering(group) -> Iterator[None]:
    """Within the context, GroupError where ranks of the group do not answer: with torch's words, and who is missing."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, GroupError):
            raise
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        raise GroupError(f"rank {rank} of {ranks} had no answer: {_text(error)}{_missing(group)}") from error


def _missing(group) -> str:
    """Who does not answer any more, as torch says; only gloo can tell."""
    if dist.get_backend(group) != dist.Backend.GLOO:
        return ""
    try:
        dist.monitored_barrier(group, NAMING, wait_all_ranks=True)
    except RuntimeError as error:
        return f"; {_text(error)}"
    return ""


def _text(error: Exception) -> str:
    """Kind and first line of an error."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
