"""States of the model's own that ranks divide, such as caches of keys and values: each rank has its heads' part."""

import dataclasses
import json

import torch
import torch.distributed as dist

from relax_passes.parallel.placement import Ranks, Shard
from relax_passes.parallel.shard_tensors import SHARDED
from stof_tvm.parallel.ranks import Peers


def shards_of(states, mod) -> dict[str, Shard]:
    """By the name of each divided state, how a module that `ShardTensors` made divides it."""
    if mod.attrs is None or SHARDED not in mod.attrs:
        return {}
    found = json.loads(str(mod.attrs[SHARDED]))["states"]
    return {x.name: Shard(found[x.node][0], tuple(found[x.node][1])) for x in states if x.node in found}


def local_states(states, shards: dict[str, Shard], ranks: Ranks | None) -> tuple:
    """The states with a rank's part of the initial values of those that are divided."""
    if ranks is None:
        return tuple(states)
    return tuple(
        dataclasses.replace(x, initial=_part(x.initial, shards[x.name], ranks)) if x.name in shards else x
        for x in states
    )


def whole_state(state: torch.Tensor, shard: Shard, peers: Peers) -> torch.Tensor:
    """A state's whole value, from the parts (…) of all ranks; every rank must ask for it."""
    parts = [torch.empty_like(state) for _ in range(peers.count)]
    own = state.contiguous()
    with peers.in_step():
        peers.collective(
            "an all-gather of a state",
            own.device.type == "cpu",
            lambda async_op: dist.all_gather(parts, own, group=peers.group, async_op=async_op),
        )
    sizes = [size // peers.count for size in shard.sizes]
    pieces = zip(*(part.split(sizes, shard.axis) for part in parts))
    return torch.cat([x for piece in pieces for x in piece], shard.axis)


def _part(tensor: torch.Tensor, shard: Shard, ranks: Ranks) -> torch.Tensor:
    ranges = [tensor.narrow(shard.axis, first, end - first) for first, end in shard.ranges(ranks)]
    return torch.cat(ranges, shard.axis)
