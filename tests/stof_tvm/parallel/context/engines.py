"""Engines of sequences that two ranks share; `python -m tests.stof_tvm.parallel.context.engines RANK PORT FOLDER`."""

import os
import signal
import sys

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import stof_tvm
from stof_tvm import masks
from tests.models.families import BertLike, GptLike, LlamaLike
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.parallel.launch import run_checks
from tests.stof_tvm.parallel.ranks import refusal

LENGTH = 160
BIGBIRD = masks.bigbird(window=8, global_tokens=[0, 1], random_fill=0.1, block=16)


class Encoder(BertLike):
    """A table of positions; the last hidden state of each token."""

    def forward(self, ids):
        return super().forward(ids)[0]


class ByHand(nn.Module):
    """Heads among the batch's entries, as torch.bmm takes them, and a mask of positions that the model adds."""

    def __init__(self, layers, length):
        super().__init__()
        self.words, self.qkv = nn.Embedding(50, 32), nn.Linear(32, 96)

    def forward(self, ids):
        q, k, v = (x.unflatten(2, (4, 8)).transpose(1, 2).flatten(0, 1) for x in self.qkv(self.words(ids)).chunk(3, -1))
        at = torch.arange(ids.shape[1])
        far = (at[:, None] - at).abs() > 30
        scores = torch.bmm(q * 8**-0.5, k.mT).masked_fill(far, -torch.inf)
        out = torch.bmm(scores.softmax(-1), v)
        return out.unflatten(0, (-1, 4)).transpose(1, 2).flatten(2)


CASES = {
    "by hand": (ByHand, 1, None),
    "encoder, bigbird": (Encoder, 1, BIGBIRD),
    "rotary decoder, documents": (LlamaLike, 1, {"blocks.0": masks.document([70, 50, 40])}),
    "decoder, window": (GptLike, 1, masks.sliding_window(12)),
}


def model_of(kind: type, **sizes) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"length": LENGTH} | sizes if kind is not LlamaLike else sizes
    return kind(**sizes).eval()


def ids_of(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(0, 50, (2, length), generator=torch.Generator().manual_seed(length))


def shared(model, inputs, ranks, **options):
    return stof_tvm.build(model, QUICK_LLVM, inputs, context_parallel=ranks, tuning_logs=False, **options)


def cases(rank, mesh) -> dict:
    """Each engine beside that of one process, on inputs that were not verified."""
    found = {}
    for name, (kind, layers, mask) in CASES.items():
        model, ids = model_of(kind, layers=layers), ids_of()
        engine = shared(model, (ids,), mesh, mask=mask)
        alone = stof_tvm.build(model, QUICK_LLVM, (ids,), mask=mask, tuning_logs=False, verify=False)
        here, there = (e(ids.flip(1)) for e in (engine, alone))
        here, there = (x if isinstance(x, dict) else {"": x} for x in (here, there))
        engine.gather_outputs = False
        part = engine(ids.flip(1))
        part = part if isinstance(part, dict) else {"": part}
        report = engine.report()
        tokens = engine.plan.tokens(rank)
        found[name] = {
            "verification": report.verification.result,
            "text": str(report),
            "sites": len(report.rewritten),
            "error": max((here[key] - there[key]).abs().max().item() for key in there),
            "part_is_right": all(torch.equal(here[key][:, tokens], part[key]) for key in there),
            "tokens": len(tokens),
        }
    return found


class Mixing(nn.Module):
    """An attention and `mix`, of (batch, tokens, 16)."""

    def __init__(self, mix):
        super().__init__()
        self.words, self.mix, self.conv = nn.Embedding(50, 16), mix, nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, ids):
        x = self.words(ids)
        heads = x.unflatten(2, (2, 8)).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.mix(self, x + y.transpose(1, 2).flatten(2))


def biased(model, x):
    at = torch.arange(x.shape[1])
    bias = -(at[:, None] - at).abs().float()
    heads = x.unflatten(2, (2, 8)).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)


MIXES = {
    "neighbours": lambda model, x: model.conv(x.transpose(1, 2)),
    "mean of tokens": lambda model, x: x - x.mean(1, keepdim=True),
    "sum of tokens": lambda model, x: x + x.sum(1, keepdim=True),
    "last token": lambda model, x: x[:, -1],
    "shift": lambda model, x: x.roll(1, 1),
    "bias of pairs": biased,
    "mean of features": lambda model, x: x - x.mean(2, keepdim=True),
}


def mixes(rank, mesh) -> dict:
    """What mixes tokens outside of attention's masks is refused; what mixes features is not."""
    torch.manual_seed(0)
    return {name: refusal(lambda: shared(Mixing(mix), (ids_of(),), mesh, verify=False)) for name, mix in MIXES.items()}


def arguments(rank, mesh) -> dict:
    model, ids = model_of(GptLike, layers=1), ids_of()
    engine = shared(model, (ids,), mesh, verify=False)
    return {
        "mesh": refusal(lambda: shared(model, (ids,), mesh, mesh=mesh)),
        "replaceable": refusal(lambda: shared(model, (ids,), mesh, replaceable_masks=True)),
        "number": refusal(lambda: shared(model, (ids,), 2)),
        "no tokens": refusal(lambda: shared(model, (ids[0],), mesh)),
        "no batch": refusal(lambda: shared(model, (ids[:0],), mesh, verify=False)),
        "padding": refusal(lambda: shared(WithPadding(), {"ids": ids, "attention_mask": torch.ones_like(ids)}, mesh)),
        "short": refusal(lambda: shared(model, (ids[:, :15],), mesh)),
        "path": refusal(lambda: shared(model, (ids,), mesh, mask={"nowhere": masks.causal()})),
        "rule": refusal(lambda: shared(model, (ids,), mesh, mask=masks.runtime.xattention())),
        "masks": refusal(lambda: shared(model, (ids,), mesh, mask=masks.sliding_window(3 + rank), verify=False)),
        "one": refusal(lambda: shared(model, (ids,), mesh, mask={["*", "nowhere"][rank]: masks.causal()})),
        "call": refusal(lambda: engine(ids[:, :32])),
        "with_mask": refusal(lambda: engine.with_mask(masks.causal())),
        "save": refusal(lambda: engine.save("engine.stof")),
    }


class WithPadding(nn.Module):
    def forward(self, ids, attention_mask):
        return ids + attention_mask


def killed(rank, mesh) -> dict:
    """Rank 1 is killed between two calls."""
    engine = shared(model_of(GptLike, layers=1), (ids := ids_of(),), mesh, verify=False)
    engine(ids)
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"call": refusal(lambda: engine(ids))}


CHECKS = (cases, mixes, arguments, killed)


def main(rank: int, port: str, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    run_checks(CHECKS, init_device_mesh("cpu", (2,)), rank, folder)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
