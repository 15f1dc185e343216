"""What two processes compute together, as the tests of it ask for it: `python two_ranks.py RANK PORT FILE`."""

import os
import sys
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

from stof_tvm import masks, sparse_attention
from stof_tvm.errors import StofError
from stof_tvm.parallel import ContextPlan, context_plan, ranks
from stof_tvm.parallel.context.plan import equal_parts
from tests.stof_tvm.parallel.context.some_masks import HEADS, some_masks

LENGTH, KV_HEADS, BATCH = 203, 2, 2
MASKS = some_masks(LENGTH)
CASES = {
    "window and global rows": torch.float32,
    "causal documents": torch.bfloat16,
    "by head": torch.float32,
    "two documents": torch.float32,
    "by batch": torch.float32,
    "window, long": torch.float32,
    "causal, in equal parts": torch.float32,
    "window, of a causal plan": torch.float32,
    "sinks, in one pass": torch.float32,
}


def case(name: str) -> tuple:
    """(mask, q, k, v, options) of the whole sequence."""
    torch.manual_seed(0)
    length, options, heads, kv_heads = LENGTH, {}, HEADS, KV_HEADS
    if name == "two documents":
        mask, length = masks.document([192, 192]), 384
        options = {"sink": torch.randn(HEADS), "softcap": 5.0}
    elif name == "by batch":
        mask = torch.rand(BATCH, 1, LENGTH, LENGTH) < 0.02
    elif name == "window, long":
        mask, length, options = masks.sliding_window(30), 700, {"sink": torch.randn(HEADS), "scale": 0.3}
    elif name == "window, of a causal plan":
        mask = masks.sliding_window(30)
    elif name == "causal, in equal parts":
        mask, length = masks.causal(), 202
    elif name == "sinks, in one pass":
        mask, length, heads, kv_heads = masks.a_shape(4, 30), 704, 8, 1
        options = {"sink": torch.randn(heads)}
    else:
        mask = MASKS[name]
    dtype = CASES[name]
    q = torch.randn(BATCH, heads, length, 16, dtype=dtype)
    k, v = (torch.randn(BATCH, kv_heads, length, dim, dtype=dtype) for dim in (16, 8))
    return mask, q, k, v, options


def plan_for(name: str):
    """The plan by which the ranks have their tokens, and the argument that says so."""
    mask, q, *_ = case(name)
    if name == "window, of a causal plan":
        plan = context_plan(masks.causal(), q.shape[2], 2)
    elif name == "causal, in equal parts":
        return ContextPlan(mask, q.shape[2], 2, equal_parts(q.shape[2] // 2, 2)), None
    else:
        plan = context_plan(mask, q.shape[2], 2)
    return plan, plan


def attend(group, name: str, rank: int) -> dict:
    """The rank's part of a case: out, lse, bytes that it received."""
    mask, q, k, v, options = case(name)
    (layout, plan), received = plan_for(name), []

    def counted(output, *arguments, move=dist.all_to_all_single, **named):
        received.append(output.nbytes)
        return move(output, *arguments, **named)

    parts = [layout.shard(x, rank) for x in (q, k, v)]
    parts[1] = parts[1].transpose(1, 2).contiguous().transpose(1, 2)  # tokens before heads
    options |= {"enable_gqa": True, "return_lse": True, "group": group, "plan": plan}
    with mock.patch.object(dist, "all_to_all_single", counted):
        out, lse = sparse_attention(*parts, mask, **options)
    # A call of a known kind, and the plan's mask where there is one.
    again, _ = sparse_attention(*parts, None if plan is not None and "of a" not in name else mask, **options)
    return {"out": out, "lse": lse, "again": again, "bytes": sum(received)}


def refused(call) -> str:
    """The error of a call."""
    try:
        call()
    except StofError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(rank: int, port: str, file: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    ranks.NAMING = 1.0
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    group, found, causal = dist.group.WORLD, {}, masks.causal()

    halves = context_plan(causal, 128, 2)

    def call(mask=causal, tokens=64, plan=halves, group=group, **options):
        x = torch.randn(1, 1, tokens, 8)
        return sparse_attention(x, x, x, mask, group=group, plan=plan, **options)

    found["bias"] = refused(lambda: call(bias=torch.zeros(1) if rank else None))
    for name in CASES:
        found[name] = attend(group, name, rank)
    found["other masks"] = refused(lambda: call(masks.strided(3 + rank)))
    found["rule"] = refused(lambda: call(masks.runtime.top_blocks(1)))
    found["other length"] = refused(lambda: call(tokens=64 + rank, plan=None))
    found["other plan"] = refused(lambda: call(plan=[None, halves][rank]))
    found["other tokens"] = refused(lambda: call(tokens=64 - rank))
    found["no plan"] = refused(lambda: call(plan="equal"))
    found["three ranks"] = refused(lambda: call(plan=context_plan(causal, 128, 3)))
    # A rank that does not call, and one that is gone.
    impatient = dist.new_group([0, 1])
    with mock.patch.dict(os.environ, {"STOF_PARALLEL_TIMEOUT": "2"}):
        call(group=impatient)
    if rank == 0:
        found["silent"] = refused(lambda: call(masks.strided(9), group=impatient))
    # A call that one rank alone refuses: its next one may not be taken for the one in which the others wait.
    late = dist.new_group([0, 1])
    with mock.patch.dict(os.environ, {"STOF_PARALLEL_TIMEOUT": "2"}):
        call(group=late)
    if rank == 1:
        found["refused alone"] = refused(lambda: call(tokens=63, group=late))
        found["after it"] = refused(lambda: call(group=late))
    dist.barrier()
    call()  # what all ranks refused before is no obstacle
    torch.save(found, file)
    if rank == 1:
        os._exit(0)
    found["gone, at a known call"] = refused(call)
    found["gone, at a new call"] = refused(lambda: call(masks.strided(9)))
    torch.save(found, file)
    os._exit(0)  # not waiting for the one that is gone


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
