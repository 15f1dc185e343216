"""What two ranks find where one of them comes late to the first call of a group; run by test_late.py.

usage: python -m tests.stof_tvm.parallel.late RANK PORT FOLDER
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from stof_tvm import masks, sparse_attention
from tests.stof_tvm.parallel.launch import run_checks

SECONDS = 4


def attend(seed: int, group: dist.ProcessGroup) -> str:
    """The error of this rank's half of a causal attention against one process's, or the exception's text."""
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=torch.Generator().manual_seed(seed)).unbind()
    half = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    try:
        out = sparse_attention(q[..., half, :], k[..., half, :], v[..., half, :], masks.causal(), group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)[..., half, :]
    return f"error {(out - expected).abs().max():.1e}"


def calls_after_one_that_a_rank_came_to_late(rank: int, groups: list) -> dict:
    """The early rank catches the error of its first call and goes on; the late one begins then."""
    found = {}
    for late, group in enumerate(groups):
        dist.barrier()
        if rank == late:
            time.sleep(SECONDS + 2)
        found[f"rank {late} late"] = [attend(seed, group) for seed in range(3)]
    return found


def a_new_group(rank: int, groups: list) -> str:
    dist.barrier()
    return attend(0, dist.new_group([0, 1]))


if __name__ == "__main__":
    rank, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "STOF_PARALLEL_TIMEOUT": str(SECONDS)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    two_groups = [dist.new_group([0, 1]) for _ in range(2)]
    run_checks([calls_after_one_that_a_rank_came_to_late, a_new_group], two_groups, rank, folder)
