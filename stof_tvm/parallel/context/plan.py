"""The plan of a mask for ranks that share a sequence: who has which tokens, and who needs whose keys."""

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.attention.flex_attention import BlockMask

from stof_tvm.given_masks import GivenAsMask, GivenMask, given_mask, without_sizes
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.windows import sliding_window
from stof_tvm.parallel.context.assignment import assign, imbalance
from stof_tvm.parallel.context.lists import BLOCK, PatternLists, packed, unpacked
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.errors import InputError, MaskError

LEAST_TOKENS = 8  # of a rank
PLAN_BYTES, PLANS = 1 << 30, 64  # limits of the cache


class Layout:
    """Who has which tokens.

    Attributes
    ----------
    owner : int64 (length,)
        The rank of each token.
    way : str
        How the tokens are shared out.
    digest : str
        Hex SHA-256: equal where all ranks have the same tokens.
    """

    def __init__(self, owner: np.ndarray, way: str):
        self.owner, self.way = owner, way
        self.digest = hashlib.sha256(owner.astype("<i8").tobytes()).hexdigest()
        self._on_device: dict[tuple, torch.Tensor] = {}  # a copy in each call would wait for the GPU

    def tokens_for(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """The tokens of a rank, int64 (n,), where a tensor is; not to be written to."""
        return self._index(x, rank, lambda: np.flatnonzero(self.owner == rank))

    def places_for(self, x: torch.Tensor) -> torch.Tensor:
        """Where each token is among those of rank 0, then of rank 1 …: int64 (length,); not to be written to."""
        return self._index(x, None, lambda: np.argsort(np.argsort(self.owner, kind="stable")))

    def _index(self, x: torch.Tensor, rank: int | None, make: Callable[[], np.ndarray]) -> torch.Tensor:
        key = x.device, rank
        if key in self._on_device and _is_plain(x):
            return self._on_device[key]
        with torch.inference_mode(False):  # autograd records later calls
            index = torch.from_numpy(make()).to(x.device)
        if _is_plain(x) and _is_plain(index):
            self._on_device[key] = index
        return index


def _is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor has data of its own; one of a trace is of no use to another call."""
    return type(x) is torch.Tensor and not torch.compiler.is_compiling()


@functools.lru_cache(maxsize=64)
def equal_parts(tokens: int, ranks: int) -> Layout:
    """Rank r has the r-th `tokens` tokens."""
    return Layout(np.repeat(np.arange(ranks), tokens), "equal parts")


class ContextPlan:
    """How ranks share a sequence under a mask; made from the mask's lists alone, on every rank the same.

    `context_plan` makes it.  Each rank has some tokens, and computes the attention of their queries; it receives the
    keys and values that some of these rows keep and that it does not have, and nothing else.

    Attributes
    ----------
    mask : Mask
    length, ranks : int
        Number of tokens of the sequence, and of ranks.
    way : str
        How the tokens are shared out: "equal runs", "runs of equal work", "two runs each", "whole documents" or "dealt
        chunks" (assignment.py).
    owner : int64 (length,)
        The rank of each token.
    layout : Layout
        Both of these.
    work : int64 (ranks,)
        Kept blocks of 64 × 64 of each rank's rows, in rows: summed over the patterns of batch entries and heads.
    """

    def __init__(self, mask: Mask, length: int, ranks: int, layout: Layout | None = None):
        self.mask, self.length, self.ranks = mask, length, ranks
        stored = mask.compile(length, length, (BLOCK, BLOCK))
        if stored.is_empty:
            raise MaskError(f"the mask {mask!r} keeps nothing at ({length}, {length})")
        self._stored = stored
        self._patterns = [PatternLists(stored, pattern) for pattern in range(stored.n_patterns)]
        self._shared = np.bincount(stored.head_to_mask.reshape(-1), minlength=stored.n_patterns).tolist()
        listed = np.sum([count * lists.listed for count, lists in zip(self._shared, self._patterns)], axis=0)
        rows = np.repeat(np.asarray(listed, np.int64), BLOCK)[:length]
        self.layout = Layout(*assign(rows, self._free, self._moved, ranks)) if layout is None else layout
        self.owner, self.way = self.layout.owner, self.layout.way
        self.work = np.bincount(self.owner, rows, ranks).astype(np.int64)
        self._own = packed(self.owner == np.arange(ranks)[:, None])
        self._known: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that the plan keeps in memory, at most."""
        lists = sum(each.nbytes for each in self._patterns)
        return self.owner.nbytes + self._own.nbytes * (1 + len(self._known)) + lists + self._stored.bitmap.nbytes

    def with_mask(self, mask: Mask) -> "ContextPlan":
        """The plan of another mask for the same tokens of the ranks.

        Raises MaskError where the mask keeps nothing or does not fit the length.
        """
        return ContextPlan(mask, self.length, self.ranks, self.layout)

    @functools.cached_property
    def imbalance(self) -> float:
        """By what share the largest work of a rank exceeds the mean."""
        return imbalance(self.work)

    @property
    def digest(self) -> str:
        """Hex SHA-256 of what the mask keeps: ranks with another mask have another one."""
        return self._stored.digest

    def check_heads(self, batch: int, q_heads: int) -> None:
        """Return if an attention of `batch` entries and `q_heads` heads fits the mask; else raises MaskError."""
        self._stored.head_map(batch, q_heads)

    def keeps_own(self, rank: int) -> bool:
        """Whether the rows of `rank` keep any of its own tokens, in any head.

        Raises InputError for a rank that is not in the plan.
        """
        mine = self.positions(rank)
        return any(lists.rows_that_keep(self._own[rank])[mine].any() for lists in self._patterns)

    def positions(self, rank: int) -> np.ndarray:
        """The tokens of a rank as `tokens` has them, in an array: int64 (n,).

        Raises InputError for a rank that is not in the plan.
        """
        self._check_rank(rank)
        return np.flatnonzero(self.owner == rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.ranks:
            raise InputError(f"rank {rank} is not in 0…{self.ranks - 1}")

    def tokens(self, rank: int) -> torch.Tensor:
        """The tokens of a rank, ascending, int64 (n,): those of q, k, v and the output there.

        Raises InputError for a rank that is not in the plan.
        """
        return torch.from_numpy(self.positions(rank))

    def shard(self, x: torch.Tensor, rank: int, dim: int = -2) -> torch.Tensor:
        """A rank's part of a tensor of the whole sequence, of any dtype and shape (…, length, …).

        Parameters
        ----------
        x : tensor
            With the tokens along `dim`.
        rank : int
        dim : int
            -2 by default, as in (B, H, S, D).

        Raises
        ------
        InputError
            `x` has another number of tokens, or the plan no such rank.
        """
        self._check_dim(x, dim, self.length)
        self._check_rank(rank)
        return x.index_select(dim, self.layout.tokens_for(x, rank))

    def unshard(self, parts: Sequence[torch.Tensor], dim: int = -2) -> torch.Tensor:
        """The tensor of the whole sequence from the parts of all ranks, in order of ranks: (…, length, …), any dtype.

        Parameters
        ----------
        parts : sequence of tensors
        dim : int
            The axis of the tokens.

        Raises
        ------
        InputError
            The parts do not have the ranks' tokens.
        """
        if len(parts) != self.ranks:
            raise InputError(f"a plan for {self.ranks} ranks has as many parts, got {len(parts)}")
        for part, tokens in zip(parts, np.bincount(self.owner, minlength=self.ranks), strict=True):
            self._check_dim(part, dim, int(tokens))
        whole = torch.cat(list(parts), dim)
        return whole.index_select(dim, self.layout.places_for(whole))

    def _check_dim(self, x, dim: int, tokens: int) -> None:
        if not isinstance(x, torch.Tensor) or not -x.dim() <= dim < x.dim() or x.shape[dim] != tokens:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise InputError(f"a tensor with {tokens} tokens along dimension {dim} is expected, got {shape}")

    def classes(self, kv_heads: int) -> np.ndarray:
        """Which key heads of which batch entries need the same tokens: int64 (1 or batch, 1 or kv_heads).

        `needs` has a row for each class.  Raises MaskError if the mask has heads that the key heads do not divide.
        """
        return self._by_key_heads(kv_heads)[0]

    def needs(self, kv_heads: int) -> np.ndarray:
        """Bits of the keys that the ranks' rows keep: uint8 (classes, ranks, block columns, 8), little-endian.

        Raises MaskError as `classes`, of `kv_heads`.
        """
        return self._by_key_heads(kv_heads)[1]

    def received(self, rank: int, kv_heads: int) -> np.ndarray:
        """Which tokens' keys `rank` receives, for each class: boolean (classes, length).

        Raises MaskError as `classes`, of `kv_heads`.
        """
        return unpacked(self.needs(kv_heads)[:, rank] & ~self._own[rank], self.length)

    def received_tokens(self, kv_heads: int) -> np.ndarray:
        """How many tokens' keys each rank receives: int64 (ranks, 1 or batch, 1 or kv_heads).

        Raises MaskError as `classes`, of `kv_heads`.
        """
        classes, needs = self._by_key_heads(kv_heads)
        counts = np.bitwise_count(needs & ~self._own).sum(axis=(2, 3), dtype=np.int64)
        return counts[classes].transpose(2, 0, 1)

    def received_rows(self, kv_heads: int, batch: int = 1) -> np.ndarray:
        """How many rows of keys, of one head and batch entry each, every rank receives: int64 (ranks,).

        As many rows of values come with them.  Raises MaskError as `classes`, of `kv_heads`; `batch` is an attention's.
        """
        return np.broadcast_to(self.received_tokens(kv_heads), (self.ranks, batch, kv_heads)).sum(axis=(1, 2))

    def rows_that_receive(self, rank: int) -> np.ndarray:
        """Which rows of `rank` keep a key of another one, in any head: boolean (tokens of the rank,).

        Raises InputError for a rank that is not in the plan.
        """
        found = np.zeros(self.length, np.bool_)
        others = packed(self.owner != rank)
        for lists in self._patterns:
            found |= lists.rows_that_keep(others)
        return found[self.positions(rank)]

    def _by_key_heads(self, kv_heads: int) -> tuple[np.ndarray, np.ndarray]:
        """(`classes`, `needs`) for a number of key heads."""
        grid = self._stored.head_to_mask
        heads = grid.shape[1]
        if heads > 1 and heads % kv_heads:
            raise MaskError(f"the mask {self.mask!r} has {heads} heads, no multiple of the {kv_heads} of k")
        if kv_heads not in self._known:
            groups = grid.reshape(len(grid), kv_heads if heads > 1 else 1, -1)
            numbers: dict[tuple[int, ...], int] = {}
            classes = np.array(
                [[numbers.setdefault(tuple(np.unique(g).tolist()), len(numbers)) for g in row] for row in groups]
            )
            by_pattern = [lists.needed(self.owner, self.ranks) for lists in self._patterns]
            needs = [np.bitwise_or.reduce([by_pattern[p] for p in patterns]) for patterns in numbers]
            self._known[kv_heads] = classes, np.stack(needs)
        return self._known[kv_heads]

    def _free(self) -> np.ndarray:
        crossed = np.sum([lists.crossings() for lists in self._patterns], axis=0)
        return np.flatnonzero(crossed[1:] == 0) + 1

    def _moved(self, owner: np.ndarray) -> float:
        own = packed(owner == np.arange(self.ranks)[:, None])
        needs = (lists.needed(owner, self.ranks) for lists in self._patterns)
        return sum(int(n) * int(np.bitwise_count(bits & ~own).sum()) for n, bits in zip(self._shared, needs))


def context_plan(mask: GivenAsMask | None, length: int, ranks: int) -> ContextPlan:
    """The plan by which ranks share a sequence under a mask; equal masks share it.

    Parameters
    ----------
    mask : Mask, bool tensor or array, BlockMask or mask_mod function, optional
        As `sparse_attention` takes it, for the whole sequence: a tensor is bool (…, length, length).  A function that
        depends on the batch entry or the head is none, for want of their numbers.  None keeps all.
    length : int
        Number of tokens of the sequence, at least 8 for each rank.
    ranks : int
        Number of ranks, at least 1.

    Returns
    -------
    ContextPlan
        The same on every rank.

    Raises
    ------
    InputError
        A length or number of ranks that is no such integer.
    MaskError
        The mask keeps nothing, does not fit the length, or is none.
    """
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        outside = ": the world size of a group that this process is not in" if ranks == -1 else ""
        raise InputError(f"ranks={ranks!r} must be a positive integer{outside}")
    _check_length(length, ranks)
    if callable(mask) and not isinstance(mask, Mask | BlockMask):
        mask = without_sizes(mask)
    shape = tuple(getattr(mask, "shape", ()))  # of a tensor, whose heads count
    batch, heads = ((1, 1, *shape)[-4:-2] if len(shape) > 2 else (1, 1)) if not isinstance(mask, Mask) else (1, 1)
    return plan_of(mask, (batch, heads, length, length), ranks)


def plan_of(
    mask: GivenAsMask | None, sizes: tuple[int, int, int, int], ranks: int, layout: Layout | None = None
) -> ContextPlan:
    """The plan for an attention of the sizes (batch, heads, length, length), for masks that are evaluated by these.

    Without a layout the mask decides who has which tokens.
    """
    given = given_mask(mask, sizes)
    key = given.identity, sizes[2], ranks, None if layout is None else layout.digest
    return _plans.get(key) or _plans.put(key, ContextPlan(_made(given, sizes[2]), sizes[2], ranks, layout))


def _check_length(length, ranks: int) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < LEAST_TOKENS * ranks:
        least = f"at least {LEAST_TOKENS} for each of {ranks} ranks"
        raise InputError(f"length={length!r} must be an integer number of tokens, {least}")


def _made(given: GivenMask, length: int) -> Mask:
    mask = given.make()
    return sliding_window(length) if mask is None else mask  # that wide a window keeps all


_plans: BoundedCache[ContextPlan] = BoundedCache(lambda plan: plan.nbytes, PLAN_BYTES, PLANS)
