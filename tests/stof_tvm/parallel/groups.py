"""Groups of which processes are in unequal numbers; `python -m tests.stof_tvm.parallel.groups RANK PORT FOLDER`."""

import os
import sys

import torch
import torch.distributed as dist

from stof_tvm import masks, sparse_attention
from tests.stof_tvm.parallel.launch import run_checks
from tests.stof_tvm.parallel.ranks import refusal

GROUPS = ([0, 1], [0, 2], [1, 2], [0, 1])


def attentions(rank, world) -> dict:
    """An attention with each group, the newest first: one of its members is in four groups, the other in three."""
    groups = [dist.new_group(members) for members in GROUPS]
    found = {}
    for number in (3, 1, 2, 0):
        if rank in GROUPS[number]:
            found[str(number)] = attention(groups[number])
    return found | {"world": attention(world)}


def attention(group) -> str:
    x = torch.randn(1, 1, 16, 8)
    return refusal(lambda: sparse_attention(x, x, x, masks.causal(), group=group))


def main(rank: int, port: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "STOF_PARALLEL_TIMEOUT": "30"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=3)
    run_checks([attentions], dist.group.WORLD, rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
