"""Predicted times of a model on meshes of tensor × context ranks, simulated from the real lists of its mask.

On a mesh T × C each of C groups of T consecutive ranks has the tokens that a `ContextPlan` for C ranks gives it; each
rank of a group has one T-th of the heads and of the weights.  A layer takes

    own       the group's rows with its own keys, predicted by the model that chooses kernels      (attention)
    exchange  keys and values that the rows of the busiest rank keep and others have               (links)
    received  rows with received keys, by the same model
    copies    bytes of the exchange that are gathered, sent, received and laid, over the memory bandwidth
    products  matrices of the layer
    norms     residual sums and norms of the rank's tokens, whole on every tensor rank
    reduce    two sums of the group's tokens over its ranks, where T > 1

    layer = max(own, exchange) + received + copies + products + norms + reduce

of the slowest of two ranks: the one with the most work, and the one that receives the most.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
import tvm

from stof_tvm.attention import MAX_VIEW
from stof_tvm.masks.mask import Mask, per_head
from stof_tvm.parallel.context.exchange import Places
from stof_tvm.parallel.context.parts import Parts
from stof_tvm.parallel.context.plan import LEAST_TOKENS, ContextPlan, context_plan
from stof_tvm.parallel.planning.links import Links
from stof_tvm.parallel.planning.model import PlannedModel
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import choose
from tir_kernels.cuda.device import gpu_of
from tir_kernels.errors import InputError

LARGEST_GRID = 1 << 28  # blocks of 16 × 32 of a mask for which a kernel is chosen; larger ones are scaled


@dataclass(frozen=True)
class MeshTimes:
    """What a mesh of `tensor` × `context` ranks is predicted to take; µs and bytes are a layer's.

    Attributes
    ----------
    tensor, context : int
    way : str
        How tokens are shared out (ContextPlan).
    imbalance : float
        By what share the kept blocks of a rank exceed the mean.
    tokens : tuple of int
        The fewest and the most tokens of a rank.
    received_bytes : int
        Keys and values that the busiest rank receives.
    moved_bytes : int
        What all ranks receive: the least that the mask allows, for these tokens.
    own_us, received_us, exchange_us, copies_us, products_us, norms_us, reduce_us, layer_us : float
    total_ms : float
        All layers.
    speedup, efficiency : float
        Against one GPU, and by GPU.
    """

    tensor: int
    context: int
    way: str
    imbalance: float
    tokens: tuple[int, int]
    received_bytes: int
    moved_bytes: int
    own_us: float
    received_us: float
    exchange_us: float
    copies_us: float
    products_us: float
    norms_us: float
    reduce_us: float
    layer_us: float
    total_ms: float
    speedup: float = 1.0
    efficiency: float = 1.0

    def to_dict(self) -> dict:
        """The fields by name."""
        return asdict(self)


class Simulation:
    """A model and its mask on a machine.

    Raises InputError for a mask that depends on the batch entry, MaskError for one that does not fit the model.
    """

    def __init__(self, mask: Mask, model: PlannedModel, target: tvm.target.Target, links: Links):
        if mask.batch is not None:
            raise InputError(f"the mask {mask!r} depends on the batch entry: meshes are planned for masks that do not")
        mask.compile(model.length, model.length).head_map(1, model.q_heads)
        self.mask, self.model, self.target, self.links = mask, model, target, links
        self._one: MeshTimes | None = None

    def on_one(self) -> MeshTimes:
        """The prediction for one GPU."""
        if self._one is None:
            self._one = self._times(1, 1)
        return self._one

    def on(self, tensor: int, context: int) -> MeshTimes:
        """The prediction for a mesh; `meshes` lists those that the model's sizes allow."""
        if tensor * context == 1:
            return self.on_one()
        found, one = self._times(tensor, context), self.on_one().total_ms
        speedup = one / found.total_ms
        return MeshTimes(**{**asdict(found), "speedup": speedup, "efficiency": speedup / (tensor * context)})

    def _times(self, tensor: int, context: int) -> MeshTimes:
        model, plan = self.model, context_plan(self.mask, self.model.length, context)
        bandwidth = gpu_of(self.target).bandwidth
        element, dims = model.element_bytes, 2 * model.head_dim
        rows = self._received_rows(plan, tensor)
        tokens = np.bincount(plan.owner, minlength=context)
        exchange = self.links.exchange_us(int(rows.max()) * dims * element, context * tensor <= self.links.host)
        ranks = {int(plan.work.argmax()), int(rows.argmax())}
        attention = [(*self._attention(plan, rank, tensor), int(rows[rank])) for rank in sorted(ranks)]
        copies = [4 * received * dims * element / bandwidth for *_, received in attention]
        slowest, (own, received, _) = max(
            enumerate(attention), key=lambda each: max(each[1][0], exchange) + each[1][1] + copies[each[0]]
        )
        most = int(tokens.max()) * model.batch
        products = model.products_us(most, 1 / tensor, self.target)
        norms = model.norms_us(most, self.target)
        reduce = 2 * self.links.sum_us(most * model.hidden * element, tensor, bandwidth)
        layer = max(own, exchange) + received + copies[slowest] + products + norms + reduce
        return MeshTimes(
            tensor=tensor,
            context=context,
            way=plan.way,
            imbalance=plan.imbalance,
            tokens=(int(tokens.min()), int(tokens.max())),
            received_bytes=int(rows.max()) * dims * element,
            moved_bytes=int(plan.received_rows(model.kv_heads, model.batch).sum()) * dims * element,
            own_us=own,
            received_us=received,
            exchange_us=exchange,
            copies_us=copies[slowest],
            products_us=products,
            norms_us=norms,
            reduce_us=reduce,
            layer_us=layer,
            total_ms=layer * model.layers / 1000,
        )

    def _received_rows(self, plan: ContextPlan, tensor: int) -> np.ndarray:
        """Rows of keys that each context rank receives, with the heads of the tensor rank that receives most."""
        model = self.model
        counts = np.broadcast_to(plan.received_tokens(model.kv_heads), (plan.ranks, model.batch, model.kv_heads))
        return counts.reshape(plan.ranks, model.batch, tensor, -1).sum(axis=(1, 3)).max(axis=1)

    def _attention(self, plan: ContextPlan, rank: int, tensor: int) -> tuple[float, float]:
        """Predicted µs of a rank's own and received keys, with the heads of the tensor rank with the most blocks."""
        model, pieces = self.model, _pieces(plan)
        of_heads = _heads(plan, model.q_heads, tensor)
        if plan.ranks == pieces == 1:
            return self._predicted(of_heads.mask, plan.length, plan.length, tensor), 0.0
        if pieces > plan.ranks:  # the largest of more pieces, as many times as the rank has its blocks
            finer = context_plan(of_heads.mask, plan.length, pieces)
            largest = int(finer.work.argmax())
            own, received = self._attention_of_parts(finer, largest, tensor)
            return (own + received) * float(of_heads.work[rank] / finer.work[largest]), 0.0
        return self._attention_of_parts(of_heads, rank, tensor)

    def _attention_of_parts(self, plan: ContextPlan, rank: int, tensor: int) -> tuple[float, float]:
        laid = Places(plan, rank, self.model.kv_heads // tensor)
        parts = Parts(plan, rank, self.model.q_heads // tensor, laid)
        own = 0.0
        if parts.own is not None:
            own = self._predicted(parts.own, len(parts.own.rows), parts.own.width, tensor, gives_lse=bool(parts.runs))
        masks = [run.mask for run in parts.runs]
        return own, sum(self._predicted(mask, len(mask.rows), mask.width, tensor, continues=True) for mask in masks)

    def _predicted(self, mask: Mask, q_len: int, kv_len: int, tensor: int, **part) -> float:
        model = self.model
        elements = model.batch * (model.q_heads // tensor) * q_len * model.head_dim
        if elements > MAX_VIEW:
            raise InputError(
                f"q of batch={model.batch}, heads={model.q_heads // tensor}, {q_len} tokens of a GPU and "
                f"head-dim={model.head_dim} has {elements} elements: a kernel takes fewer than 2^31"
            )
        problem = AttentionProblem(
            model.batch,
            model.q_heads // tensor,
            model.kv_heads // tensor,
            q_len,
            kv_len,
            model.head_dim,
            model.head_dim,
            model.dtype,
            model.head_dim**-0.5,
            **part,
        )
        return choose(problem, mask, self.target).predicted_us


def meshes(model: PlannedModel, gpus: int) -> Iterator[tuple[int, int]]:
    """(tensor, context) of all meshes of so many GPUs that divide the heads and leave each rank some tokens."""
    for tensor in _divisors(gpus):
        if not _why_not(model, tensor, gpus // tensor):
            yield tensor, gpus // tensor


def left_out(model: PlannedModel, gpus: int) -> dict[str, str]:
    """Why other meshes are not among `meshes`, by their names."""
    reasons = {f"{tensor} × {gpus // tensor}": _why_not(model, tensor, gpus // tensor) for tensor in _divisors(gpus)}
    return {name: reason for name, reason in reasons.items() if reason}


def _divisors(gpus: int) -> list[int]:
    return [n for n in range(1, gpus + 1) if gpus % n == 0]


def _why_not(model: PlannedModel, tensor: int, context: int) -> str:
    """Why a mesh is none for a model, "" where it is one."""
    for count, what in ((model.kv_heads, "key heads"), (model.intermediate, "columns of the MLP")):
        if count % tensor:
            return f"{tensor} does not divide the {count} {what}"
    if model.length < LEAST_TOKENS * context:
        return f"{model.length} tokens are fewer than {LEAST_TOKENS} for each of {context} ranks"
    return ""


def _pieces(plan: ContextPlan) -> int:
    """The number of ranks, or more where the mask of a rank would be too large to choose a kernel for."""
    pieces = plan.ranks
    while (plan.length // pieces // 16) * (plan.length // 32) > LARGEST_GRID:
        pieces *= 2
    return pieces


def _heads(plan: ContextPlan, q_heads: int, tensor: int) -> ContextPlan:
    """The plan with the heads of one tensor rank: of masks by head those with the most kept blocks."""
    mask = plan.mask
    if mask.heads is None or tensor == 1:
        return plan
    share = q_heads // tensor
    groups = [per_head([mask.at(0, h) for h in range(t * share, (t + 1) * share)]) for t in range(tensor)]
    return plan.with_mask(max(groups, key=lambda group: group.density(plan.length)))
