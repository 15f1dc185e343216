"""Compiled kernels with their masks on the device, kept for the next call with the same mask."""

import functools
from dataclasses import replace

import torch

from stof_tvm.given_masks import GivenMask
from stof_tvm.launches.counters import Counters, is_captured
from stof_tvm.launches.planned_lists import PlannedLists
from stof_tvm.masks.mask import Mask
from stof_tvm.running.bounded_cache import BoundedCache
from stof_tvm.tuning.logs.replay import tuned_choices
from tir_kernels.attention.compiled import compile_attention
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import Choice, choose
from tir_kernels.compiling.quick_script import no_frames_left
from tir_kernels.errors import DeviceError, MaskError
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import cuda_arch, parse_target

PLAN_BYTES, PLANS = 256 << 20, 256  # limits of the cache: bytes of masks and workspaces, number of plans
ALIGNED = 64  # elements: the counters of a call lie 256 bytes apart


class Launch:
    """A compiled kernel with its mask on the device."""

    def __init__(self, choice: Choice, target, device: torch.device):
        self.problem = choice.problem
        self.function = compile_attention(choice.template.NAME, choice.problem, choice.config, target)
        plan = None
        if choice.problem.block_map is not None:
            plan = choice.template.plan(choice.problem, choice.config, target, choice.mask)
        self.plan = None if plan is None else PlannedLists(plan, target, device)
        operands = choice.operands(target) if plan is None else plan.rest
        self.operands = tuple(torch.tensor(array, device=device) for array in operands.constants)
        self.shares_workspace = operands.unwritten
        # A workspace that calls have of their own is not held between them.
        where = device if self.shares_workspace else torch.device("meta")
        self.workspace = tuple(
            torch.zeros(shape, dtype=getattr(torch, dtype), device=where) for shape, dtype in operands.workspace
        )
        self.counters = Counters(0 if self.shares_workspace else sum(self._counted()), device)

    @property
    def nbytes(self) -> int:
        """Bytes that are held between calls: of the mask, of a workspace that calls share, and of ready counters."""
        of_plan = 0 if self.plan is None else self.plan.nbytes
        held = sum(x.nbytes for x in (*self.operands, *self.workspace) if not x.is_meta)
        return held + of_plan + self.counters.nbytes

    def __call__(self, inputs, sink, block_map, earlier) -> tuple[torch.Tensor, ...]:
        """Run the kernel on `inputs`, (q, k, v, [bias]); returns (out,) or (out, lse).

        `earlier` holds the results of the previous launch of the plan, or nothing.  Only the last launch reads `sink`.
        `block_map` is the map of the problem, or None.
        """
        problem, q = self.problem, inputs[0]
        if is_captured(q.device):
            in_graphs.add(self)
        results: tuple[torch.Tensor, ...] = (torch.empty(problem.shape("out"), dtype=q.dtype, device=q.device),)
        if problem.gives_lse:
            results += (torch.empty(problem.lse_shape, dtype=torch.float32, device=q.device),)
        sinks = () if problem.sink_dtype is None else (sink,)
        maps = () if problem.block_map is None else (block_map,) if self.plan is None else self.plan(block_map)
        self.function(*inputs, *sinks, *maps, *earlier, *self.operands, *self._own_workspace(q.device), *results)
        return results

    def _own_workspace(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """A call's own: calls on other streams, and replays of captured calls, may run at the same time."""
        if self.shares_workspace or not self.workspace:
            return self.workspace
        # Floats are written before they are read.  Counters begin at 0: one buffer, which one memset clears.
        zeros = self.counters.take().split(self._counted())
        return tuple(
            torch.empty_like(x, device=device) if x.is_floating_point() else zero[: x.numel()].view(x.shape)
            for x, zero in zip(self.workspace, zeros)
        )

    def _counted(self) -> list[int]:
        """How many counters each array of the workspace has, with those that only keep it apart from the next."""
        return [0 if x.is_floating_point() else -(-x.numel() // ALIGNED) * ALIGNED for x in self.workspace]


def planned(
    problem: AttentionProblem,
    given: GivenMask,
    device: torch.device,
    kernel: str | None,
    tuning_logs,
    alike: GivenMask | None = None,
) -> list[Launch]:
    """The launches of a call, none of which depends on the data; none at all for a mask that keeps nothing.

    With `alike`, another mask of the same problem, which has a block map, the mask is computed by the one kernel that
    is chosen for that, and may keep nothing.
    """
    key = problem, given.identity, device, kernel, tuning_logs, alike and alike.identity
    known = plans.get(key)
    if known is not None:
        return known
    with no_frames_left():  # those above hold tensors
        return plans.put(key, _new_plan(problem, given, device, kernel, tuning_logs, alike))


def _new_plan(problem, given: GivenMask, device, kernel, tuning_logs, alike: GivenMask | None) -> list[Launch]:
    target = target_of(device)
    if alike is None:
        return [Launch(part, target, device) for part in _chosen(problem, given, target, kernel, tuning_logs).launches]
    mask, blocks = given.make(), problem.block_map
    if mask is not None and _stored(mask, problem, blocks.block_m, blocks.block_n).is_empty:
        return []
    try:
        choice = _choice_alike(problem, alike, target, kernel, tuning_logs)
    except MaskError:  # that one keeps nothing
        choice = _chosen(problem, given, target, kernel, tuning_logs)
    if mask is not None:
        choice = replace(choice, mask=_stored(mask, problem, choice.config.block_m, choice.config.block_n))
    return [Launch(choice, target, device)]


def _stored(mask: Mask, problem: AttentionProblem, block_m: int, block_n: int) -> BlockSparseMask:
    """The mask in blocks, perhaps none; MaskError where it does not fit the problem."""
    stored = mask.compile(problem.mask_rows, problem.kv_len, (block_m, block_n))
    stored.head_map(problem.batch, problem.q_heads)
    return stored


def _chosen(problem, given: GivenMask, target, kernel: str | None, tuning_logs) -> Choice:
    tuned = None if kernel is not None else tuned_at(tuning_logs, target)
    return choose(problem, given.make(), target, kernel, tuned)


def _choice_alike(problem, given: GivenMask, target, kernel, tuning_logs) -> Choice:
    """The choice for a mask, of which many sections are computed one after the other."""
    key = problem, given.identity, target, kernel, tuning_logs
    return choices.get(key) or choices.put(key, _chosen(problem, given, target, kernel, tuning_logs))


# Launches that CUDA graphs of callers have: a replay reads their masks, whatever the cache has dropped since.
in_graphs: set[Launch] = set()
plans: BoundedCache[list[Launch]] = BoundedCache(lambda plan: sum(x.nbytes for x in plan), PLAN_BYTES, PLANS)
choices: BoundedCache[Choice] = BoundedCache(
    lambda choice: sum(x.nbytes for x in choice.mask.arrays.values()), PLAN_BYTES, PLANS
)


@functools.lru_cache(maxsize=8)
def tuned_at(tuning_logs, target):
    """What the tuning logs of a folder say for a target, read once."""
    return tuned_choices(tuning_logs, target)


@functools.cache
def target_of(device: torch.device):
    """The target of a device's kernels; DeviceError for one that has none."""
    if device.type == "cpu":
        return parse_target("llvm")
    if device.type != "cuda":
        raise DeviceError(f"tensors are on {device}; kernels run on 'cpu' and 'cuda'")
    return parse_target({"kind": "cuda", "arch": cuda_arch(*torch.cuda.get_device_capability(device))})
