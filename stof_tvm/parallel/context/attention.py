"""`sparse_attention` of ranks that share a sequence.

Each rank computes its rows with its own keys while those of others arrive, and then the rows that keep any of these:
on a GPU by a kernel that continues from the first result, on a CPU by merging both by their log-sum-exp.  Where that
takes longer, a rank waits for the keys and computes its rows once (joined.py).
"""

import hashlib
import weakref

import torch
import torch.distributed as dist

from stof_tvm.attention import Options, attend, check_inputs, without_added_dimensions
from stof_tvm.given_masks import NO_MASK, GivenMask, given_mask
from stof_tvm.launches.counters import is_captured
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.parallel.contents import checksum_of
from stof_tvm.parallel.context.exchange import Exchange, Transfer
from stof_tvm.parallel.context.joined import joined
from stof_tvm.parallel.context.merge import merged
from stof_tvm.parallel.context.parts import Parts
from stof_tvm.parallel.context.plan import ContextPlan, equal_parts, plan_of
from stof_tvm.parallel.ranks import Peers, check_not_destroyed, peers_of
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.errors import InputError, MaskError, UnsupportedError

CALLS = 64  # kinds of calls of a group that are kept
FIRST, EXCHANGE = "a first attention", "the exchange of keys"


def context_attention(q, k, v, mask, bias, enable_gqa: bool, sink, options: Options, group, plan: ContextPlan | None):
    """The attention of this rank's tokens; `sparse_attention` says what the arguments are.

    q, k and v are (B, H, S, D) of float32, float16 or bfloat16.  Raises what `sparse_attention` does.
    """
    rank, ranks = _place_in(group)
    with peers_of(group).in_step():
        check_mode(options.float32)
        return _context_attention(q, k, v, mask, bias, enable_gqa, sink, options, group, plan, rank, ranks)


def _context_attention(q, k, v, mask, bias, enable_gqa, sink, options, group, plan, rank: int, ranks: int):
    calls = _calls.setdefault(group, BoundedCache(lambda call: 1, CALLS, CALLS))
    dims, q, k, v = check_inputs(q, k, v, bias, sink, enable_gqa)
    _check_call(q, k, v, mask, bias, plan, ranks)
    if mask is None and plan is not None:
        mask = plan.mask
    layout = equal_parts(q.shape[2], ranks) if plan is None else plan.layout
    length = len(layout.owner)
    sizes = (q.shape[0], q.shape[1], length, length)
    given = given_mask(mask, sizes)
    kind = _but_tokens(q), _but_tokens(k), _but_tokens(v), q.dtype, None if sink is None else sink.dtype, repr(options)
    key = given.identity, layout.digest, kind
    call = calls.get(key)
    if call is None:
        own = plan_of(mask, sizes, ranks, layout)
        call = _Call(own, rank, q, k)
        call.check_tokens(q)
        told = _told(own, q, k, v, sink, options)
        peers_of(group).agree(FIRST, told)
        call.kind = hashlib.sha256(repr(told).encode()).digest()[:8]
        calls.put(key, call)
    call.check_tokens(q)
    return without_added_dimensions(call(q, k, v, sink, options, peers_of(group)), dims, options.return_lse)


class _Call:
    """What calls with one mask and one kind of inputs share on a rank."""

    def __init__(self, plan: ContextPlan, rank: int, q: torch.Tensor, k: torch.Tensor):
        self.rank, self.length, self.kind = rank, plan.length, b""
        plan.check_heads(q.shape[0], q.shape[1])
        self.exchange = Exchange(plan, rank, q.shape[0], k.shape[1])
        parts = Parts(plan, rank, q.shape[1], self.exchange.where)
        self.joined = joined(plan, rank, q.shape[1], self.exchange, parts)
        if self.joined is not None:
            parts.own, parts.runs = self.joined.mask, []
        self.own = None if parts.own is None else _given(parts.own)
        self.runs = [(slice(run.first, run.end), _given(run.mask)) for run in parts.runs]

    def check_tokens(self, q: torch.Tensor) -> None:
        """InputError unless q has the rank's number of tokens."""
        if q.shape[2] != self.exchange.tokens:
            raise InputError(
                f"rank {self.rank} has {self.exchange.tokens} of the {self.length} tokens by the plan, got q with "
                f"{q.shape[2]}: plan.tokens({self.rank}) are its tokens"
            )

    def __call__(self, q, k, v, sink, options: Options, peers: Peers) -> tuple[torch.Tensor, ...]:
        if is_captured(k.device):
            _in_graphs.add(self)
        transfer = None
        if self.exchange.is_needed:
            with peers.answering(EXCHANGE):
                peers.begin()
                # On GPUs nobody looks at it, which would wait for them.
                tag = self.kind + peers.at.to_bytes(8, "little") if k.device.type == "cpu" else b""
                transfer = self.exchange.start(k, v, peers.group, tag)
        if self.joined is not None and transfer is not None:
            with_own = [self.joined.keys(x) for x in (k, v)]  # while others arrive
            received = self._finish(transfer, peers, k)
            k, v = map(self.joined.complete, with_own, received)
            transfer = None
        first = options._replace(return_lse=bool(self.runs) or options.return_lse)
        if self.own is None:
            results = attend(q, k[:, :, :0], v[:, :, :0], NO_MASK, None, sink, first)
        else:
            results = attend(q, k, v, self.own, None, sink, first)
        if transfer is None:
            return results
        keys, values = self._finish(transfer, peers, k)
        for rows, part in self.runs:
            earlier = tuple(x[:, :, rows] for x in results)
            later = _continued(q[:, :, rows], keys, values, part, options, earlier)
            if rows.stop - rows.start == q.shape[2]:
                return later
            for result, rest in zip(results, later):
                result[:, :, rows] = rest
        return results

    def _finish(self, transfer: Transfer, peers: Peers, k) -> list[torch.Tensor]:
        """The received keys and values."""
        with peers.answering(EXCHANGE):
            return transfer.finish(lambda work: peers.wait(work, EXCHANGE, k.device.type == "cpu"))


def _continued(q, k, v, mask: GivenMask, options: Options, earlier) -> tuple[torch.Tensor, ...]:
    """(out,), or (out, lse), of the earlier result's keys and these together."""
    if can_continue(q.device.type, options.kernel):
        return attend(q, k, v, mask, None, None, options, earlier)
    return merged(earlier, attend(q, k, v, mask, None, None, options._replace(return_lse=True)))


def can_continue(device: str, kernel: str | None) -> bool:
    """Whether a kernel of a device type can continue from an earlier result; `kernel` is the one asked for, if any."""
    return device == "cuda" and kernel != "row-wise"


def _given(mask: Mask) -> GivenMask:
    return GivenMask(mask.identity, lambda: mask)


def _place_in(group) -> tuple[int, int]:
    """(this process's rank in the group, its number of ranks)."""
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            f"group must be a torch.distributed.ProcessGroup that this process is in, got {type(group).__name__}"
        )
    check_not_destroyed(group)
    return dist.get_rank(group), dist.get_world_size(group)


def _check_call(q, k, v, mask, bias, plan, ranks: int) -> None:
    """Refuse what a group does not compute."""
    if plan is not None and not isinstance(plan, ContextPlan):
        raise InputError(f"plan must be what parallel.context_plan makes, got {type(plan).__name__}")
    if plan is not None and plan.ranks != ranks:
        raise InputError(f"the plan is one for {plan.ranks} ranks, the group has {ranks}")
    if isinstance(mask, Rule):
        raise MaskError(
            f"{mask!r} with group=: a rule is not cut among ranks, each of which has some of the tokens only; leave "
            "group out, or give a static mask, such as rule.mask(q, k) of the whole sequence"
        )
    if bias is not None:
        raise UnsupportedError("a bias with a group: ranks that share a sequence do not share out a bias of all pairs")
    if q.shape[2] != k.shape[2]:
        raise InputError(
            f"with a group a rank's queries and keys are of the same tokens, got {q.shape[2]}, {k.shape[2]}"
        )
    if 0 in q.shape or 0 in v.shape:
        raise InputError(f"with a group no size may be 0: q {tuple(q.shape)}, v {tuple(v.shape)}")


def _told(plan: ContextPlan, q, k, v, sink, options: Options) -> dict[str, str]:
    """What must be the same on all ranks in the calls of a kind, in words, by what it is."""
    told = {name: f"{_but_tokens(x)} of {x.dtype}" for name, x in (("q", q), ("k", k), ("v", v))}
    told |= {f"{name}=": repr(value) for name, value in options._asdict().items()}
    told["mask"] = f"{plan.digest[:12]}"
    told["tokens"] = f"{plan.length} ({plan.way}, {plan.layout.digest[:12]})"
    told["sink"] = "None" if sink is None else f"{sink.dtype}, checksum {checksum_of([sink]):08x}"
    return told


def _but_tokens(x: torch.Tensor) -> tuple[int, int, int]:
    return x.shape[0], x.shape[1], x.shape[3]


_calls: "weakref.WeakKeyDictionary[dist.ProcessGroup, BoundedCache[_Call]]" = weakref.WeakKeyDictionary()
_in_graphs: set[_Call] = set()  # calls whose indices of rows a graph reads, for nobody tells when it is gone
