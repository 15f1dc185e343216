"""What two ranks do, each a process on the CPU; `python -m tests.stof_tvm.parallel.ranks RANK PORT FOLDER`.

Each function below is a check that both ranks run; what it returns is written to FOLDER/RANK.json for the tests.
"""

import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stof_tvm
from relax_passes.parallel import regions
from stof_tvm import masks
from stof_tvm.errors import StofError
from stof_tvm.parallel.ranks import Peers
from tests.models.families import BertLike, GptLike, LlamaLike, T5Like, example_calls, merge_heads, split_heads
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.parallel.launch import run_checks

HEAD_MASKS = masks.per_head([masks.sliding_window(n) for n in (1, 2, 4, 8)])
LAYERS = {"bert": (BertLike, {"layers": 1}), "gpt": (GptLike, {"layers": 1}), "t5": (T5Like, {})}


def model_of(kind: type, **sizes) -> nn.Module:
    """The same model on every rank."""
    torch.manual_seed(0)
    return kind(**sizes).eval()


def built(model, inputs, mesh, **options):
    """The engine of a rank."""
    return stof_tvm.build(model, QUICK_LLVM, inputs, mesh=mesh, tuning_logs=False, **options)


def told(engine) -> dict:
    report = engine.report()
    return {"notes": list(report.notes), "verification": report.verification.result, "text": str(report)}


def families(rank, mesh) -> dict:
    calls = example_calls()
    return {name: told(built(model_of(kind, **n), calls[name][1], mesh)) for name, (kind, n) in LAYERS.items()}


def llama(rank, mesh) -> dict:
    """Grouped-query heads, beside the engine of one process; and what cannot be done with it."""
    model, inputs = model_of(LlamaLike, layers=1), example_calls()["llama"][1]
    engine = built(model, inputs, mesh)
    ids = inputs[0].flip(1)
    alone = stof_tvm.build(model, QUICK_LLVM, inputs, tuning_logs=False, verify=False)
    here, there = engine(ids), alone(ids)
    error = max((here[name] - there[name]).abs().max().item() for name in here)
    largest = max((x.shape[0] * x.shape[1] for x in engine._weights.tensors if x.ndim == 2), default=0)
    return {
        **told(engine),
        "error": error,
        "bytes": sum(x.nbytes for x in engine._weights.tensors),
        "bytes_alone": sum(x.nbytes for x in alone._weights.tensors),
        "largest": largest,
        "save": refusal(lambda: engine.save("engine.stof")),
    }


def head_masks(rank, mesh) -> dict:
    """A mask for each head, from a file: a rank's kernel has those of its own heads."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "masks.json"))
        masks.Assignment({"layers.0": HEAD_MASKS}).save(file)
        engine = built(model_of(BertLike, layers=1), example_calls()["bert"][1], mesh, mask=file)
    site = engine.report().rewritten[0]
    return {**told(engine), "heads": site.shape.heads, "all_heads": site.all_heads, "mask": site.mask}


def odd_heads(rank, mesh) -> dict:
    """Three heads on two ranks: the attention is whole on both, the MLP is divided."""
    return told(built(model_of(BertLike, layers=1, dim=24, heads=3), example_calls()["bert"][1], mesh))


class Decoder(nn.Module):
    """One token's attention over a cache of keys and values, with grouped heads."""

    def __init__(self, dim=32, heads=4, kv_heads=2, length=16):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        small = dim // heads * kv_heads
        self.query, self.output = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key, self.value = nn.Linear(dim, small), nn.Linear(dim, small)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, kv_heads, length, dim // heads))

    def forward(self, x, at):
        q = split_heads(self.query(x), self.heads)
        self.keys.index_copy_(2, at, split_heads(self.key(x), self.kv_heads))
        self.values.index_copy_(2, at, split_heads(self.value(x), self.kv_heads))
        keep = (torch.arange(self.keys.shape[2]) <= at[:, None])[None, None]
        out = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=keep, enable_gqa=True)
        return self.output(merge_heads(out))


def cache(rank, mesh) -> dict:
    """States are divided with their heads."""
    torch.manual_seed(0)
    engine = built(Decoder().eval(), (torch.randn(1, 1, 32), torch.tensor([3])), mesh)
    kept = {name: list(x.shape) for name, x in engine.state.items()}
    return {**told(engine), "shapes": kept, "whole": list(engine.whole_state("keys").shape)}


class Vocabulary(GptLike):
    """The logits of the last token."""

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(self.norm(x[:, -1]), self.tokens.weight)


def vocabulary(rank, mesh) -> dict:
    """Columns of a last product, gathered; in bfloat16, which gloo does not move."""
    with mock.patch.multiple(regions, LEAST_GATHERED=1, SHARE_GATHERED=1):
        return told(built(model_of(Vocabulary, layers=1).bfloat16(), example_calls()["gpt"][1], mesh))


def from_file(rank, mesh) -> dict:
    """The model is on the meta device, its weights are in a file of rank 0's."""
    with tempfile.TemporaryDirectory() as folder:
        name = [str(Path(folder, "weights.pt"))]
        dist.broadcast_object_list(name)
        if rank == 0:
            torch.save(model_of(GptLike, layers=1).state_dict(), name[0])
        dist.barrier()
        with torch.device("meta"):
            model = GptLike(layers=1).eval()
        engine = built(model, inputs := example_calls()["gpt"][1], mesh, weights=name[0])
        with torch.no_grad():
            error = (engine(*inputs) - model_of(GptLike, layers=1)(*inputs)).abs().max().item()
        dist.barrier()  # rank 0 has the folder
    return {**told(engine), "error": error}


def one_fails(rank, mesh) -> dict:
    """The mask of rank 1 does not fit."""
    model, inputs = model_of(BertLike, layers=1), example_calls()["bert"][1]
    mask = {"nowhere": masks.sliding_window(2)} if rank else None
    return {"refusal": refusal(lambda: built(model, inputs, mesh, mask=mask))}


def other_weights(rank, mesh) -> dict:
    """All of them, and the last quarter of one matrix; nobody verifies."""
    torch.manual_seed(rank)
    model, inputs = BertLike(layers=1).eval(), example_calls()["bert"][1]
    found = {"refusal": refusal(lambda: built(model, inputs, mesh, verify=False))}
    model = model_of(BertLike, layers=1)
    largest = max(model.parameters(), key=torch.numel)
    with torch.no_grad():
        largest.view(-1)[-largest.numel() // 4 :] += rank
    return {**found, "deep": refusal(lambda: built(model, inputs, mesh, verify=False))}


def other_masks(rank, mesh) -> dict:
    """Ranks mean different masks, both of which every rank could compile; nobody verifies."""
    model, inputs = model_of(BertLike, layers=1), example_calls()["bert"][1]
    mask = masks.sliding_window(2 + rank)
    return {"refusal": refusal(lambda: built(model, inputs, mesh, mask=mask, verify=False))}


def wrong_on_one(rank, mesh) -> dict:
    """Rank 1 finds its results wrong: nobody gets an engine."""
    from stof_tvm.verification import verify

    right = verify.results_and_states
    if rank:
        verify.results_and_states = lambda *call: [x + 1 for x in right(*call)]
    try:
        return {"refusal": refusal(lambda: built(model_of(BertLike, layers=1), example_calls()["bert"][1], mesh))}
    finally:
        verify.results_and_states = right


def arguments(rank, mesh) -> dict:
    model, inputs = model_of(BertLike, layers=1), example_calls()["bert"][1]
    return {
        "replaceable": refusal(lambda: built(model, inputs, mesh, replaceable_masks=True)),
        "mesh": refusal(lambda: built(model, inputs, 2)),
        "planes": refusal(lambda: built(model, inputs, init_device_mesh("cpu", (1, 2)))),
    }


def late(rank, mesh) -> dict:
    """Rank 1 does not come to a step in time."""
    os.environ["STOF_PARALLEL_TIMEOUT"] = "1"
    peers = Peers(dist.new_group([0, 1]))
    del os.environ["STOF_PARALLEL_TIMEOUT"]
    started = time.monotonic()
    if rank:
        time.sleep(3)
        return {}
    return {"refusal": refusal(lambda: peers.step("a test", int)), "seconds": time.monotonic() - started}


def refused_inputs(rank, mesh) -> dict:
    """Inputs that all ranks refuse, then some that rank 1 alone does, which goes on."""
    model, inputs = model_of(BertLike, layers=1), example_calls()["bert"][1]
    os.environ["STOF_PARALLEL_TIMEOUT"] = "2"
    group = dist.new_group([0, 1])
    engine = built(model, inputs, group, verify=False)
    del os.environ["STOF_PARALLEL_TIMEOUT"]
    shorter = [x[:, :-1] for x in inputs]
    all_refuse = refusal(lambda: engine(*shorter))
    after = refusal(lambda: engine(*inputs))
    if not rank:
        return {"all": all_refuse, "after": after}
    alone = refusal(lambda: engine(*shorter))
    return {"all": all_refuse, "after": after, "alone": alone, "next": refusal(lambda: engine(*inputs))}


def killed(rank, mesh) -> dict:
    """Rank 1 is killed between two calls."""
    engine = built(model_of(BertLike, layers=1), inputs := example_calls()["bert"][1], mesh, verify=False)
    engine(*inputs)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    call = refusal(lambda: engine(*inputs))
    build = refusal(lambda: built(model_of(BertLike, layers=1), inputs, mesh))
    return {"call": call, "build": build, "seconds": time.monotonic() - started}


def refusal(compute) -> str:
    """The class and the message of the error of a computation, "" for none."""
    try:
        compute()
    except StofError as error:
        return f"{type(error).__name__}: {error}"
    return ""


CHECKS = (
    *(
        families,
        llama,
        head_masks,
        odd_heads,
        cache,
        vocabulary,
        from_file,
        one_fails,
        other_weights,
        other_masks,
        wrong_on_one,
    ),
    *(arguments, late, refused_inputs, killed),
)


def main(rank: int, port: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    run_checks(CHECKS, init_device_mesh("cpu", (2,)), rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
