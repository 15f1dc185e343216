"""Heads that choose among rules, too: what they cost, the least loss, the file, and engines that are built with it."""

import itertools
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stof_tvm
from stof_tvm import masks, sparse_attention
from stof_tvm.errors import InputError, MaskError, UnsupportedError
from stof_tvm.masks import runtime
from tests.models.quick_llvm import QUICK_LLVM

SIZE, HEADS = 16, 4
BLOCK = (16, 32)
FEW, SOME = (runtime.top_blocks(n, block=BLOCK, causal=True) for n in (1, 2))
NEAR = masks.a_shape(2, 8)
CANDIDATES = [NEAR, FEW, SOME]


class Attend(nn.Module):
    """Causal attention of grouped heads, whose likes move from sample to sample."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(SIZE, (HEADS + 4) * SIZE)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, SIZE)).transpose(1, 2).split([HEADS, 2, 2], 1)
        return F.scaled_dot_product_attention(3 * q, k, v, is_causal=True, enable_gqa=True, scale=0.3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = Attend()

    def forward(self, x):
        return self.attend(x).transpose(1, 2).flatten(2)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Model().eval()


@pytest.fixture(scope="module")
def samples():
    """Two calls of other batches and lengths."""
    torch.manual_seed(1)
    return [torch.randn(2, 100, SIZE), torch.randn(1, 70, SIZE)]


def operands(model, x):
    q, k, v = model.attend.qkv(x).unflatten(-1, (-1, SIZE)).transpose(1, 2).split([HEADS, 2, 2], 1)
    return 3 * q, k, v


def kept_of(entry, q, k, head):
    """Boolean (B, S, S): what a candidate keeps in a head, in plain PyTorch."""
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    if isinstance(entry, masks.Mask):
        return (entry.dense(length) & causal).expand(len(q), -1, -1)
    found = entry.block_map(q * 0.3 * SIZE**0.5, k)[:, head]
    dense = found.repeat_interleave(BLOCK[0], 1).repeat_interleave(BLOCK[1], 2)
    return dense[:, :length, :length] & causal


@torch.no_grad()
def costs_and_losses(model, samples, entries):
    """Pairs and losses (heads, candidates), by the definition; and all pairs."""
    pairs, losses, whole = torch.zeros(HEADS, len(entries)), torch.zeros(HEADS, len(entries)), 0.0
    for x in samples:
        q, k, v = operands(model, x)
        shared = torch.arange(HEADS) // 2
        scores = q @ k[:, shared].mT * 0.3
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        result = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v[:, shared]
        whole += len(x) * HEADS * int(causal.sum())
        for h, (c, entry) in itertools.product(range(HEADS), enumerate(entries)):
            kept = kept_of(entry, q, k, h)
            weights = scores[:, h].masked_fill(~kept, -torch.inf).softmax(-1)
            weights = torch.where(kept.any(-1, keepdim=True), weights, 0)
            pairs[h, c] += kept.sum()
            losses[h, c] += (weights @ v[:, shared[h]] - result[:, h]).square().sum() / result.square().sum()
    return pairs, losses, whole


@pytest.mark.parametrize("budget", [0.35, 0.5, 0.7])
def test_no_assignment_is_better_by_more_than_a_step(model, samples, budget):
    everything = masks.causal()
    pairs, losses, whole = costs_and_losses(model, samples, [*CANDIDATES, everything])
    found = masks.calibrate(model, samples, budget, candidates=CANDIDATES)
    assert found.density <= budget
    best, steps = float("inf"), 0.0
    for chosen in itertools.product(range(len(CANDIDATES) + 1), repeat=HEADS):
        cost = sum(float(pairs[h, c]) for h, c in enumerate(chosen))
        if cost <= budget * whole:
            best = min(best, sum(float(losses[h, c]) for h, c in enumerate(chosen)))
    steps = max(float(losses[h].max() - losses[h].min()) for h in range(HEADS))
    assert best - 1e-5 <= found.loss <= best + steps
    entries = runtime_entries(found["attend"])
    assert any(isinstance(entry, runtime.Rule) for entry in entries)
    places = [CANDIDATES.index(entry) if entry in CANDIDATES else len(CANDIDATES) for entry in entries]
    assert found.loss == pytest.approx(sum(float(losses[h, c]) for h, c in enumerate(places)), rel=1e-3, abs=1e-6)
    assert found.density == pytest.approx(sum(float(pairs[h, c]) for h, c in enumerate(places)) / whole)


def runtime_entries(chosen):
    """What the heads have."""
    if isinstance(chosen, masks.Mask):
        return [chosen.at(0, h) for h in range(HEADS)] if chosen.heads else [chosen] * HEADS
    return list(chosen.function.entries) if hasattr(chosen.function, "entries") else [chosen] * HEADS


@pytest.fixture(scope="module")
def mixed():
    """Heads of one attention with rules, bounded and not, and masks, one named like a rule."""
    bounded = SOME & masks.sliding_window(60)
    return masks.Assignment(
        {"attend": runtime.per_head([NEAR, FEW, bounded, masks.vertical_slash([0, 5], [0, 1])])}, 0.4, 0.1
    )


def test_the_file(mixed, tmp_path):
    path = tmp_path / "masks.json"
    masks.Assignment({**mixed, "other": FEW, "third": masks.causal()}).save(path)
    texts = json.loads(path.read_text())["masks"]
    assert texts["attend"][0] == "a_shape(2, 8)" and texts["attend"][1] == {"rule": repr(FEW)}
    assert texts["other"] == [{"rule": repr(FEW)}]
    read = masks.load(path)
    torch.manual_seed(3)
    q, k = torch.randn(1, HEADS, 90, SIZE), torch.randn(1, 2, 90, SIZE)
    for name in ("attend", "other"):
        was = ({**mixed, "other": FEW})[name]
        assert torch.equal(read[name].mask(q, k).dense(90), was.mask(q, k).dense(90))
    assert read["third"] == masks.causal() and "top_blocks(1, block=(16, 32), causal=True): heads 1" in str(read)
    read.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_rules_without_a_text(tmp_path):
    own = runtime.rule(lambda q, k: torch.ones(1, 1, 1, 1, dtype=torch.bool), block=128)
    hidden = FEW & masks.vertical_slash([0], [0])  # in a rule's text the name is the rule's
    odd = FEW & masks.from_tensor(torch.eye(8) > 0)
    for rule in (own, hidden, odd, runtime.per_head([own, NEAR])):
        with pytest.raises(MaskError, match="has no text"):
            masks.Assignment({"a": rule}).save(tmp_path / "masks.json")
    assert not (tmp_path / "masks.json").exists()


@pytest.mark.parametrize(
    "entry", [{"rule": 3}, {"rule": "causal()"}, {"rule": "top_blocks(1)", "more": 1}, {"rule": "no_rule()"}, {}]
)
def test_files_with_something_else(entry, tmp_path):
    content = {"format": "stof_tvm masks 1", "masks": {"a": [entry]}}
    (tmp_path / "masks.json").write_text(json.dumps(content))
    with pytest.raises(MaskError, match="masks.json: "):
        masks.load(tmp_path / "masks.json")


@torch.no_grad()
def test_an_engine_with_what_was_chosen(model, samples, tmp_path, capsys):
    found = masks.calibrate(model, samples, 0.5, candidates=CANDIDATES)
    found.save(tmp_path / "masks.json")
    x = samples[0]
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=str(tmp_path / "masks.json"))
    q, k, v = operands(model, x)
    kept = torch.stack([kept_of(entry, q, k, h) for h, entry in enumerate(runtime_entries(found["attend"]))], 1)
    expected = F.scaled_dot_product_attention(q, k, v, kept, enable_gqa=True, scale=0.3)
    assert (engine(x) - expected.transpose(1, 2).flatten(2)).abs().max() < 1e-4
    told = stof_tvm.explain_attention(model, x, masks.load(tmp_path / "masks.json"))
    assert "attend" in str(told)


@torch.no_grad()
def test_an_engine_with_the_file(model, mixed, tmp_path):
    mixed.save(tmp_path / "masks.json")
    x = torch.randn(2, 96, SIZE)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=str(tmp_path / "masks.json"))
    q, k, v = operands(model, x)
    rule = mixed["attend"]
    kept = rule.mask(q * 0.3 * SIZE**0.5, k).dense(96) & masks.causal().dense(96)
    expected = F.scaled_dot_product_attention(q, k, v, kept, enable_gqa=True, scale=0.3)
    assert (engine(x) - expected.transpose(1, 2).flatten(2)).abs().max() < 1e-4
    out = sparse_attention(q, k, v, masks.load(tmp_path / "masks.json")["attend"], scale=0.3, enable_gqa=True)
    assert (out - F.scaled_dot_product_attention(q, k, v, rule.mask(q * 0.3 * SIZE**0.5, k).dense(96),
                                                 enable_gqa=True, scale=0.3)).abs().max() < 1e-4  # fmt: skip
    with pytest.raises(UnsupportedError, match="padding"):
        length = torch.export.Dim("n", min=2, max=96)
        stof_tvm.build(model, QUICK_LLVM, (x,), mask=mixed, dynamic_shapes={"x": {1: length}})


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"mesh": "ranks"}, "leave mesh out"),
        ({"context_parallel": "ranks"}, "leave context_parallel out"),
        ({"replaceable_masks": True}, "leave replaceable_masks out"),
        ({"without_padding": True}, "leave it out"),
    ],
)
@pytest.mark.parametrize("as_file", [True, False])
def test_what_does_not_go_with_a_calibrated_rule(model, mixed, tmp_path, how, told, as_file):
    """One rule is enough, whatever the other heads and paths have."""
    given = masks.Assignment({"*": NEAR, **mixed})
    if as_file:
        given.save(tmp_path / "masks.json")
        given = str(tmp_path / "masks.json")
    with pytest.raises(UnsupportedError, match=f"top_blocks.* finds its blocks from q and k in each call.*{told}"):
        stof_tvm.build(model, QUICK_LLVM, (torch.randn(2, 96, SIZE),), given, **how)


class Cached(nn.Module):
    """A query over keys that the model keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, HEADS, 80, SIZE))

    def forward(self, q, k, at):
        self.keys.index_copy_(2, at, k)
        return F.scaled_dot_product_attention(q, self.keys, self.keys)


def test_what_was_calibrated_over_a_cache(tmp_path):
    """A file with a rule is refused, by the rule's name; one with masks is built."""
    torch.manual_seed(2)
    cached = Cached().eval()
    call = torch.randn(1, HEADS, 1, SIZE), torch.randn(1, HEADS, 1, SIZE), torch.tensor([3])
    found = masks.calibrate(cached, [call], 0.8, candidates=[FEW])
    assert list(found) == [""] and FEW in runtime_entries(found[""])
    for name, chosen in (("rules", found), ("masks", masks.Assignment({"": NEAR}))):
        chosen.save(tmp_path / f"{name}.json")
    with pytest.raises(UnsupportedError, match="over a cache that the model updates, where .*top_blocks"):
        stof_tvm.build(cached, QUICK_LLVM, call, str(tmp_path / "rules.json"))
    engine = stof_tvm.build(cached, QUICK_LLVM, call, str(tmp_path / "masks.json"))
    assert engine.report().verification.result == "passed" and engine.report().sites[0].mask == repr(NEAR)


def test_what_the_search_of_rules_has(model, samples):
    found = masks.calibrate(model, samples[:1], 0.8, candidates="rules")
    assert found.density <= 0.8 and list(found) == ["attend"]
    plain = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 2, 32, batch_first=True), 1, enable_nested_tensor=False
    )
    chosen = masks.calibrate(plain, [torch.randn(1, 200, 32)], 0.6, candidates="rules")
    assert chosen.density <= 0.6
    assert all("top_blocks" in repr(entry) or isinstance(entry, masks.Mask) for entry in chosen.values())


@pytest.mark.parametrize(
    "candidates, told",
    [
        ([FEW, runtime.top_blocks(1, block=64)], "rules of one block; the candidates have"),
        ([runtime.per_head([FEW, NEAR])], "masks and rules of one head"),
        ([FEW & masks.per_head([NEAR] * HEADS)], "masks and rules of one head"),
        ("rule", "candidates='rule' must be"),
    ],
)
def test_what_is_refused(model, samples, candidates, told):
    with pytest.raises((InputError, MaskError), match=told):
        masks.calibrate(model, samples, 0.5, candidates=candidates)


def test_gradients(model, samples):
    """The loss of a head is what a rule's change of its result does to the model's loss, row by row."""
    x = samples[1]
    found = masks.calibrate(
        model,
        [x],
        0.65,
        method="gradient",
        candidates=[FEW],
        loss=lambda out: out[..., :SIZE].square().sum(),
    )
    # Only the first head reaches the loss: it alone is worth keeping whole.
    entries = runtime_entries(found["attend"])
    assert all(entry is FEW or entry == FEW for entry in entries[1:])
    q, k, v = operands(model, x)
    kept = kept_of(FEW, q, k, 0)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    scores = q[:, 0] @ k[:, 0].mT * 0.3
    whole, few = (scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num() @ v[:, 0] for keep in (causal, kept))
    expected = 0.0 if entries[0] is not FEW else (2 * whole * (few - whole)).sum(-1).abs().sum().item()
    assert found.loss == pytest.approx(expected, rel=1e-3, abs=1e-6)
