"""The exchange of keys and values: what one rank sends and receives by a plan, and where received rows are laid."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from stof_tvm.parallel.context.gathered import Columns
from stof_tvm.parallel.context.lists import BLOCK
from stof_tvm.parallel.context.plan import ContextPlan
from tir_kernels.errors import ParallelError


class Places:
    """Where a rank lays the keys that it receives: blocks of `BLOCK` places, one for each block of tokens with any.

    Attributes
    ----------
    received : boolean (classes, length)
        The tokens that are received for the key heads of each class.
    count : int
        Places of each head and batch entry.
    columns : list of lists of Columns
        The token of each place, by batch entry and key head; a side of length 1 is shared by all.
    """

    def __init__(self, plan: ContextPlan, rank: int, kv_heads: int):
        self.received = plan.received(rank, kv_heads)
        self._blocks = [np.unique(np.flatnonzero(tokens) // BLOCK) for tokens in self.received]
        self.count = BLOCK * max(map(len, self._blocks))
        by_class = []
        for blocks, tokens in zip(self._blocks, self.received):
            at = (blocks[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)
            at = at[at < plan.length]
            by_class.append(Columns(at, tokens[at]))
        self.columns = [[by_class[c] for c in row] for row in plan.classes(kv_heads)]

    def of(self, number: int, tokens: np.ndarray) -> np.ndarray:
        """The places of received tokens, int64 (n,), of the class with this number."""
        return np.searchsorted(self._blocks[number], tokens // BLOCK) * BLOCK + tokens % BLOCK


class Exchange:
    """What a rank sends and receives in one attention: rows of k and of v, one for a token, head and batch entry.

    Received rows are laid into blocks of `BLOCK` places, one for each block of tokens in which the rank needs any, so
    that blocks of the mask stay blocks.  Places that nothing is received for are 0, and columns that count for nobody.

    Attributes
    ----------
    sent, received : list of int
        Rows for and from each rank.
    places : int
        Places of each head and batch entry, a multiple of BLOCK; 0 where nothing is received.
    is_needed : bool
        Whether any rank receives anything.
    where : Places
        Where they are laid.
    """

    def __init__(self, plan: ContextPlan, rank: int, batch: int, kv_heads: int):
        self.batch, self.kv_heads = batch, kv_heads
        mine = plan.positions(rank)
        self.tokens = len(mine)
        classes = np.broadcast_to(plan.classes(kv_heads), (batch, kv_heads)).reshape(-1)
        self.is_needed = bool(plan.received_rows(kv_heads, batch).any())
        here = np.full(plan.length, -1)
        here[mine] = np.arange(len(mine))
        sent = []
        for other in range(plan.ranks):
            wanted = plan.received(other, kv_heads) & (here >= 0)
            sent.append(_rows([here[tokens] for tokens in map(np.flatnonzero, wanted)], classes))
        self.rank, self.sent = rank, [len(rows.entry) for rows in sent]
        self._entry, self._position = (np.concatenate(each) for each in zip(*sent))
        self.where = laid = Places(plan, rank, kv_heads)
        self.places = laid.count
        received = []
        for other in range(plan.ranks):
            tokens_of = [np.flatnonzero(tokens & (plan.owner == other)) for tokens in laid.received]
            at = [laid.of(number, tokens) for number, tokens in enumerate(tokens_of)]
            received.append(_rows(at, classes))
        self.received = [len(rows.entry) for rows in received]
        entry, place = (np.concatenate(each) for each in zip(*received))
        self._place = entry * self.places + place
        self._on_device: dict = {}

    def start(self, k: torch.Tensor, v: torch.Tensor, group, tag: bytes = b"") -> "Transfer":
        """Send the rows of k and v, (batch, kv_heads, tokens, dim) of one dtype, that other ranks need.

        Each rank is sent the `tag`, too, in rows of its own before those of k.
        """
        pending = []
        for x, first in ((k, tag), (v, b"")):
            rows, in_order = _as_rows(x)
            tags = -(-len(first) // (x.shape[3] * x.element_size()))
            sent, received = ([count + tags for count in counts] for counts in (self.sent, self.received))
            send = rows.index_select(0, self._sources(in_order, tags, x.device))
            receive = send.new_empty((sum(received), x.shape[3]))
            raw = receive.view(torch.uint8), send.view(torch.uint8)  # gloo moves bytes, but no bfloat16
            if tags:
                data, width = raw[1].view(-1).numpy(), raw[1].shape[1]
                for begin in _begins(sent):
                    data[begin * width : begin * width + len(first)] = np.frombuffer(first, np.uint8)
            work = dist.all_to_all_single(*raw, received, sent, group=group, async_op=True)
            pending.append(_Pending(receive, send, work, tags))
        return Transfer(self, pending, tag)

    def laid(self, rows: torch.Tensor, tags: int = 0) -> torch.Tensor:
        """Received rows, (n, dim) of any dtype, in their places: (batch, kv_heads, places, dim).

        Before those of each rank are `tags` rows that have no place.
        """
        places = self.batch * self.kv_heads * self.places
        # Where every place is written there is no need for zeros.
        is_whole = sum(self.received) == places
        shape = places + bool(tags), rows.shape[1]
        laid = rows.new_empty(shape) if is_whole else rows.new_zeros(shape)
        at = self._index(f"place {tags}", rows.device, lambda: _inserted(self._place, self.received, tags, places))
        laid.index_copy_(0, at, rows)
        return laid[:places].view(self.batch, self.kv_heads, self.places, rows.shape[1])

    def _sources(self, in_order: bool, tags: int, device) -> torch.Tensor:
        """Which rows are sent, of (batch, head, token) rows in this order, or of (batch, token, head) rows.

        Before those for each rank are `tags` others.
        """

        def rows() -> np.ndarray:
            if in_order:
                return _inserted(self._entry * self.tokens + self._position, self.sent, tags, 0)
            batch, head = np.divmod(self._entry, self.kv_heads)
            at = (batch * self.tokens + self._position) * self.kv_heads + head
            return _inserted(at, self.sent, tags, 0)

        return self._index(f"{'bhs' if in_order else 'bsh'} {tags}", device, rows)

    def _index(self, name: str, device, make: Callable[[], np.ndarray]) -> torch.Tensor:
        key = name, device
        if key not in self._on_device:
            self._on_device[key] = torch.from_numpy(make().astype(np.int64)).to(device)
        return self._on_device[key]


class _Pending(NamedTuple):
    receive: torch.Tensor
    send: torch.Tensor  # which must be there until it is sent
    work: dist.Work
    tags: int  # rows before those of each rank


class Transfer:
    """Rows of k and v that are on their way."""

    def __init__(self, exchange: Exchange, pending: list[_Pending], tag: bytes):
        self.exchange, self.pending, self.tag = exchange, pending, tag

    def finish(self, wait: Callable[[dist.Work], None]) -> list[torch.Tensor]:
        """The received k and v in their places; waits by `wait(work)`.

        Raises ParallelError where a rank sent another tag.
        """
        for each in self.pending:
            wait(each.work)
        if self.tag:
            self._check_tags()
        return [self.exchange.laid(each.receive, each.tags) for each in self.pending]

    def _check_tags(self) -> None:
        receive, _, _, tags = self.pending[0]
        data, width = receive.view(torch.uint8).view(-1).numpy(), receive.shape[1] * receive.element_size()
        for rank, begin in enumerate(_begins([count + tags for count in self.exchange.received])):
            if data[begin * width : begin * width + len(self.tag)].tobytes() != self.tag:
                raise ParallelError(
                    f"rank {rank} sent keys of another call than rank {self.exchange.rank} makes, with another mask or "
                    "other options: all ranks must make the same calls, in the same order"
                )


def _begins(counts: list[int]) -> list[int]:
    """Where each rank's rows begin."""
    return [0, *itertools.accumulate(counts[:-1])]


def _inserted(rows: np.ndarray, counts: list[int], tags: int, value: int) -> np.ndarray:
    """The rows of each rank, int64 (n,), with some of a value before them; `counts` says how many each rank has."""
    return np.insert(rows, np.repeat(_begins(counts), tags), value)


class _Rows(NamedTuple):
    entry: np.ndarray  # batch entry * heads + head
    token: np.ndarray


def _rows(tokens: list[np.ndarray], classes: np.ndarray) -> _Rows:
    """The tokens of each class for all its batch entries and heads, one after the other; `classes` has theirs."""
    sizes = [len(tokens[c]) for c in classes]
    return _Rows(np.repeat(np.arange(len(classes)), sizes), np.concatenate([tokens[c] for c in classes]))


def _as_rows(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """(rows of x, one for a batch entry, head and token; whether they are in this order, or tokens before heads)."""
    if x.transpose(1, 2).is_contiguous() and not x.is_contiguous():
        return x.transpose(1, 2).reshape(-1, x.shape[3]), False
    return x.contiguous().view(-1, x.shape[3]), True
