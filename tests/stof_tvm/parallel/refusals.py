"""Calls that one rank makes otherwise; `python -m tests.stof_tvm.parallel.refusals RANK PORT FOLDER`.

Each function below is a check that both ranks run; what it returns is written to FOLDER/RANK.json for the tests.
"""

import os
import sys
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from stof_tvm import masks, sparse_attention
from stof_tvm.parallel import context_plan, ranks
from tests.models.families import BertLike, example_calls
from tests.stof_tvm.parallel.context.engines import Mixing, ids_of, shared
from tests.stof_tvm.parallel.launch import run_checks
from tests.stof_tvm.parallel.ranks import built, model_of, refusal

LENGTH = 128
WINDOW = masks.sliding_window(8)
PLAN = context_plan(WINDOW, LENGTH, 2)


def arguments(rank, mesh) -> dict:
    """Arguments of `build` that rank 1 has wrong, which it knows before anything is exchanged; and some that differ."""
    model, inputs = model_of(BertLike, layers=1), example_calls()["bert"][1]
    return {
        "mesh": refusal(lambda: built(model, inputs, mesh, float32=["ieee", "half"][rank])),
        "mask": refusal(lambda: built(model, inputs, mesh, mask=[None, 3][rank])),
        "context": refusal(lambda: shared(Mixing(nothing), (ids_of(),), mesh, strict=[True, "yes"][rank])),
        "verify": refusal(lambda: built(model, inputs, mesh, verify=bool(rank))),
    }


def nothing(model, x):
    return x


class Sign(nn.Module):
    """BERT's hidden states with a sign, which is no weight."""

    def __init__(self, sign):
        super().__init__()
        self.bert, self.sign = BertLike(layers=1), sign

    def forward(self, *inputs):
        return self.bert(*inputs)[0] * self.sign


def other_models(rank, mesh) -> dict:
    """The ranks' models differ in an operator, or in a number that is an argument of one; nobody verifies."""
    inputs, mixes = example_calls()["bert"][1], [lambda model, x: x.sin(), lambda model, x: x.cos()]
    return {
        "mesh": refusal(lambda: built(model_of(Sign, sign=[1.5, -1.5][rank]), inputs, mesh, verify=False)),
        "context": refusal(lambda: shared(model_of(Mixing, mix=mixes[rank]), (ids_of(),), mesh, verify=False)),
    }


def attention(group, mask=WINDOW, tokens=LENGTH // 2, **options):
    torch.manual_seed(0)
    x = torch.randn(1, 2, tokens, 8)
    return sparse_attention(x, x, x, mask, group=group, plan=PLAN, **options)


def new_group(*kinds) -> dist.ProcessGroup:
    """A group whose ranks know some kinds of calls, each the options of one."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=40))
    for kind in kinds:
        attention(group, **kind)
    return group


def second_call(first, second, rank, *known) -> dict:
    """What a call and the next one come to, the same for both ranks, where rank 1's first one has options `second`."""
    group, started = new_group(*known), time.monotonic()
    found = {"refusal": refusal(lambda: attention(group, **[first, second][rank]))}
    return found | {"seconds": time.monotonic() - started, "next": refusal(lambda: attention(group))}


# As many keys are moved by both: those of a window in one head, of none in the other.
HEAD_WINDOWS = [masks.per_head(each) for each in ((WINDOW, masks.sliding_window(0)), (masks.sliding_window(0), WINDOW))]
KNOWN_WINDOWS = [{"mask": mask} for mask in HEAD_WINDOWS]
BIASED, SCALED, OTHER = {"bias": torch.zeros(1)}, {"scale": 0.3}, {"mask": masks.sliding_window(5)}


def refused_kinds(rank, mesh) -> dict:
    """Rank 1 refuses a call after a first one; rank 0 waits for keys, or for what rank 1 means."""
    return {
        "known": second_call({}, BIASED, rank, {}),
        "new": second_call(SCALED, BIASED, rank, {}),
        "float32": second_call({}, {"float32": "half"}, rank, {}),
    }


def other_kinds(rank, mesh) -> dict:
    """Rank 1 calls with another kind than rank 0: one that is new, or that both know."""
    return {
        "new": second_call({}, SCALED, rank, {}),
        "new on rank 0": second_call(OTHER, {}, rank, {}),
        "known": second_call({}, SCALED, rank, {}, SCALED),
        "known mask": second_call({"mask": HEAD_WINDOWS[0]}, {"mask": HEAD_WINDOWS[1]}, rank, *KNOWN_WINDOWS),
    }


def sinks(rank, mesh) -> dict:
    """Rank 1 alone has a sink, or has another one."""
    sink = torch.arange(2.0)
    return {
        "one": second_call({}, {"sink": sink}, rank),
        "other": second_call({"sink": sink}, {"sink": sink + 1}, rank),
        "later": second_call({}, {"sink": sink}, rank, {}),
    }


def refused_inputs(rank, mesh) -> dict:
    """Rank 1 alone refuses the inputs of an engine, while rank 0 waits for its sums or keys."""
    found = {}
    for name, make in (
        ("mesh", lambda: built(model_of(BertLike, layers=1), example_calls()["bert"][1], new_group(), verify=False)),
        ("context", lambda: shared(model_of(Mixing, mix=nothing), (ids_of(),), new_group(), verify=False)),
    ):
        engine = make()
        inputs = example_calls()["bert"][1] if name == "mesh" else (ids_of(),)
        shorter = [x[:, :-1] for x in inputs] if rank else inputs
        found[name] = refusal(lambda: engine(*shorter))
        found[f"{name}, next"] = refusal(lambda: engine(*inputs))
    return found


def caught_without_keys(rank, mesh) -> dict:
    """Rank 1 refuses a call in which nothing is sent, so rank 0 learns it in its next one; both go on."""
    documents = {"mask": masks.document([LENGTH // 2, LENGTH // 2])}
    with mock.patch.dict(os.environ, {"STOF_PARALLEL_TIMEOUT": "8"}):  # rank 1 waits as long for a status in the end
        group = new_group(documents)
    found = {"documents": refusal(lambda: attention(group, **documents, **[{}, BIASED][rank]))}
    for step, options in enumerate([{}, {}, SCALED, {}]):
        found[f"step {step}"] = refusal(lambda: attention(group, **options))
    return found


def failures_of_one(rank, mesh) -> dict:
    """Rank 1 alone cannot begin an exchange: it fails there, not at a call of its own."""
    group = new_group({})
    begin = torch.Tensor.index_select

    def fail(*arguments):
        raise RuntimeError("no memory")

    if rank:
        torch.Tensor.index_select = fail
    try:
        return {"call": refusal(lambda: attention(group))}
    finally:
        torch.Tensor.index_select = begin


def destroyed_groups(rank, mesh) -> dict:
    """Groups that are used and destroyed leave no thread and no file behind, and are named when they are used again."""
    threads = []
    for _ in range(4):
        group = new_group({})
        dist.destroy_process_group(group)
        threads.append(len(os.listdir("/proc/self/task")))
    return {"threads": threads, "again": refusal(lambda: attention(group))}


CHECKS = (
    caught_without_keys,
    failures_of_one,
    destroyed_groups,
    arguments,
    other_models,
    refused_kinds,
    other_kinds,
    sinks,
    refused_inputs,
)


def main(rank: int, port: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ["STOF_PARALLEL_TIMEOUT"] = "40"
    torch.set_num_threads(1)
    ranks.NAMING = 2.0
    run_checks(CHECKS, init_device_mesh("cpu", (2,)), rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
