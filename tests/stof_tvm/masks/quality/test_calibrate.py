"""Heads of known structure get the masks that fit it, within the budget, by either method; paths are those of build."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

LENGTH, SIZE = 64, 16


class Heads(nn.Module):
    """Attention whose heads look at keys near the query, at the first keys, and at keys anywhere."""

    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        time = torch.arange(LENGTH)[:, None] * torch.tensor([0.25, 0.11, 0.05])
        near = 4 * torch.cat([time.cos(), time.sin(), torch.zeros(LENGTH, SIZE - 6)], 1)
        first = torch.zeros(LENGTH, SIZE)
        first[:2, 0] = 30
        anywhere = 30 * F.normalize(torch.randn(LENGTH, SIZE, generator=torch.manual_seed(0)), dim=1)
        ones = torch.zeros(LENGTH, SIZE).index_fill_(1, torch.tensor([0]), 3.0)
        order = torch.randperm(LENGTH, generator=torch.manual_seed(1))
        self.register_buffer("q", torch.stack([near, ones, anywhere[order]])[None])
        self.register_buffer("k", torch.stack([near, first, anywhere])[None])
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        values = x.unflatten(-1, (3, SIZE)).transpose(1, 2) * self.scale[:, None, None]
        q, k = (t.expand(len(x), -1, -1, -1) for t in (self.q, self.k))
        return F.scaled_dot_product_attention(q, k, values, is_causal=self.causal).transpose(1, 2).flatten(2)


class Model(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.attend = Heads(causal)
        self.out = nn.Linear(3 * SIZE, 8)

    def forward(self, x):
        return self.out(self.attend(x))


CANDIDATES = [masks.sliding_window(n) for n in (2, 8)] + [masks.padding([2])]
NEAR, FIRST = CANDIDATES[1], CANDIDATES[2]
torch.manual_seed(2)
SAMPLES = [
    torch.randn(2, LENGTH, 3 * SIZE),
    (torch.randn(1, LENGTH, 3 * SIZE),),
    {"x": torch.randn(1, LENGTH, 3 * SIZE)},
]


def test_each_head_gets_its_mask():
    found = masks.calibrate(Model(), SAMPLES, 0.45, candidates=CANDIDATES)
    assert list(found) == ["attend"] and found.density <= 0.45
    chosen = [found["attend"].at(0, h) for h in range(3)]
    assert chosen[0] == NEAR and chosen[1] == FIRST and chosen[2].dense(LENGTH).all()
    assert found.density == pytest.approx(found["attend"].density(LENGTH))
    assert 0 <= found.loss < 0.05


@pytest.mark.parametrize("budget", [0.04, 0.1, 0.3, 0.5, 1])
def test_the_budget_holds_and_more_of_it_loses_less(budget):
    found = masks.calibrate(Model(), SAMPLES[:1], budget, candidates=CANDIDATES)
    assert found.density <= budget
    assert found["attend"].density(LENGTH) == pytest.approx(found.density)
    more = masks.calibrate(Model(), SAMPLES[:1], 1, candidates=CANDIDATES)
    assert more.loss == pytest.approx(0, abs=1e-9) and found.loss >= more.loss


def test_the_loss_is_that_of_the_masked_attention():
    model, x = Model(causal=True), SAMPLES[0]
    found = masks.calibrate(model, [x], 0.3)
    with torch.no_grad():
        values = x.unflatten(-1, (3, SIZE)).transpose(1, 2)
        q, k = (t.expand(2, -1, -1, -1) for t in (model.attend.q, model.attend.k))
        full = F.scaled_dot_product_attention(q, k, values, is_causal=True)
        keep = found["attend"].dense(LENGTH) & masks.causal().dense(LENGTH)
        part = F.scaled_dot_product_attention(q, k, values, attn_mask=keep)
    assert found.loss == pytest.approx(((part - full).square().sum() / full.square().sum()).item(), rel=1e-3)
    assert found.density == pytest.approx(keep.sum().item() / (3 * masks.causal().dense(LENGTH).sum().item()))


def test_gradients_tell_heads_apart_that_do_not_matter():
    model = Model()
    with torch.no_grad():
        model.out.weight[:, 2 * SIZE :] = 0  # nothing reads the head that looks anywhere
    loss = lambda out: out.square().sum()
    candidates = [masks.sliding_window(2), masks.sliding_window(20), FIRST]
    found = masks.calibrate(model, SAMPLES[:1], 0.4, "gradient", candidates, loss=loss)
    by_error = masks.calibrate(model, SAMPLES[:1], 0.4, candidates=candidates)
    assert found["attend"].at(0, 2).density(LENGTH) < 0.1 < by_error["attend"].at(0, 2).density(LENGTH)
    assert found["attend"].at(0, 0).density(LENGTH) >= candidates[1].density(LENGTH)
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training


def test_the_effect_on_the_loss_is_of_first_order():
    model, x = Model(), SAMPLES[1][0]
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # frozen models have gradients by results, too
    weight = torch.randn(1, LENGTH, 8, generator=torch.manual_seed(3)).abs()
    with torch.no_grad():
        model.out.weight.abs_()
    values = x.abs()  # so that rows do not cancel where changes have one sign: an exact sum is not claimed
    found = masks.calibrate(model, [values], 0.3, "gradient", CANDIDATES, loss=lambda out: (out * weight).sum())
    keep = found["attend"].dense(LENGTH)
    q, k = model.attend.q, model.attend.k
    v = values.unflatten(-1, (3, SIZE)).transpose(1, 2)
    change = F.scaled_dot_product_attention(q, k, v, attn_mask=keep) - F.scaled_dot_product_attention(q, k, v)
    gradient = (weight @ model.out.weight).unflatten(-1, (3, SIZE)).transpose(1, 2)
    assert found.loss == pytest.approx((gradient * change).sum(-1).abs().sum().item(), rel=1e-3)


def test_samples_of_different_lengths():
    samples = [torch.randn(1, 1, n, 4, generator=torch.manual_seed(n)) for n in (16, 48)]
    assert masks.calibrate(ATTEND, samples, 0.7).density <= 0.7
    with pytest.raises(
        InputError, match=r"attention '' has \(16, 16\) queries .*, \(48, 48\) in another.* give candidates="
    ):
        masks.calibrate(CAUSAL, samples, 0.7)
    found = masks.calibrate(CAUSAL, samples, 0.7, candidates=[masks.sliding_window(4)])
    kept = sum(masks.causal().dense(n).logical_and(found[""].dense(n)).sum().item() for n in (16, 48))
    assert found.density == pytest.approx(kept / (16 * 17 / 2 + 48 * 49 / 2))


def test_nan_is_no_loss():
    with pytest.raises(InputError, match="attention '' has results or gradients that are NaN or infinite"):
        masks.calibrate(ATTEND, [X * torch.nan], 0.5)


def test_grouped_heads_and_biases():
    class Grouped(nn.Module):
        def forward(self, q, k, v, keep):
            return F.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)

    torch.manual_seed(4)
    q, k, v = torch.randn(1, 4, 32, 8), torch.randn(1, 2, 32, 8), torch.randn(1, 2, 32, 8)
    for keep in (torch.ones(32, 32).tril().bool(), torch.full((32, 32), torch.finfo(torch.float32).min).triu(1)):
        found = masks.calibrate(Grouped(), [(q, k, v, keep)], 0.5)
        assert found[""].heads == 4 and found.density <= 0.5
        texts = " ".join(repr(found[""].at(0, h)) for h in range(4))
        assert "a_shape" in texts or "vertical_slash" in texts  # the mask is known to be causal


def paths_of_build(model, inputs):
    return {site.site for site in stof_tvm.build(model, QUICK_LLVM, inputs, verify=False).report().sites}


class Twice(nn.Module):
    """Two attentions in a module, and a module that is called twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True)])

    def forward(self, x):
        x = self.inner[0](x, x, x, need_weights=False)[0]
        x = self.inner[0](x, x, x, need_weights=False)[0]
        heads = x.unflatten(-1, (2, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(heads, heads, heads)
        y = torch.nn.functional.scaled_dot_product_attention(query=y, key=heads, value=heads)
        return y.transpose(1, 2).flatten(2)


def test_paths_are_those_of_build(tmp_path):
    model, x = Twice().eval(), torch.randn(1, 24, 16)
    assert isinstance(F.scaled_dot_product_attention, type(torch._C._nn.scaled_dot_product_attention))
    found = masks.calibrate(model, [x, x], 0.4)
    assert list(found) == ["", "#1", "inner.0", "inner.0#1"]
    found.save(tmp_path / "found.json")
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=tmp_path / "found.json")
    sites = {site.site: site for site in engine.report().sites}
    assert sites.keys() == found.keys()
    for path, mask in found.items():
        assert sites[path].density == pytest.approx(mask.density(24))
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


class Held(nn.Module):
    """One attention, held by lists and under a name; calls go by the given names."""

    def __init__(self, *calls):
        super().__init__()
        block = nn.Sequential(ATTEND)
        self.layers, self.single, self.calls = nn.ModuleList([block] * 2), ATTEND, calls

    def forward(self, x):
        for name in self.calls:
            x = self.get_submodule(name)(x)
        return x


@pytest.mark.parametrize("calls", [("layers.0", "layers.1"), ("single",), ("layers.1.0", "single")])
def test_modules_under_several_names_are_refused(calls):
    model = Held(*calls)
    why = (
        r"attention 'layers.0.0' is in a module that the model also holds as 'layers.1.0', 'single': build names it by"
    )
    with pytest.raises(UnsupportedError, match=why):
        masks.calibrate(model, [X], 0.5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_modules_may_have_several_names():
    model = nn.Module()
    model.attend, model.out = ATTEND, nn.ModuleList([nn.Identity()] * 2)
    model.forward = lambda x: model.out[1](model.out[0](model.attend(model.attend(x))))
    assert list(masks.calibrate(model, [X], 0.5)) == ["attend", "attend#1"]


def test_fast_paths_are_left_and_come_back():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    found = masks.calibrate(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [torch.randn(1, 40, 16)], 0.5)
    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert torch.backends.mha.get_fastpath_enabled()


class Fails(nn.Module):
    def forward(self, x):
        F.scaled_dot_product_attention(x, x, x)
        raise KeyError("mine")


X = torch.randn(1, 1, 8, 4)
NOTHING = masks.causal() & ~masks.causal()
CAUSAL = type(
    "Causal", (nn.Module,), {"forward": lambda self, x: F.scaled_dot_product_attention(x, x, x, is_causal=True)}
)()
ATTEND = type(
    "Attend", (nn.Module,), {"forward": lambda self, x, p=0.0: F.scaled_dot_product_attention(x, x, x, None, p)}
)()


def test_a_failing_model_leaves_nothing_behind():
    model = Fails()
    with pytest.raises(KeyError, match="mine"):
        masks.calibrate(model, [X], 0.5)
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention
    assert model.training and not model._forward_hooks and not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, "errors"),
            InputError,
            "method='errors' must be 'error' or 'gradient'",
        ),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, "gradient"), InputError, "method='gradient' needs loss="),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, loss=torch.sum), InputError, "'error' takes none"),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, "gradient", loss=lambda y: 3.0), InputError, "loss must return"),
        (lambda: masks.calibrate(ATTEND, [X], 0), InputError, "budget=0 must be a number above 0 and at most 1"),
        (lambda: masks.calibrate(ATTEND, [X], 1.5), InputError, "budget=1.5 must be"),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.01),
            InputError,
            "budget=0.01: the sparsest candidates of all heads keep",
        ),
        (lambda: masks.calibrate(ATTEND, [], 0.5), InputError, "samples is empty"),
        (
            lambda: masks.calibrate(ATTEND, None, 0.5),
            InputError,
            "samples is a list of calls.*got NoneType",
        ),
        (lambda: masks.calibrate(ATTEND, X, 0.5), InputError, "samples is a list of calls.*got Tensor"),
        (lambda: masks.calibrate(torch.relu, [X], 0.5), InputError, "model must be a torch.nn.Module, got builtin"),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[NOTHING]),
            MaskError,
            "causal.* keeps nothing of attention",
        ),
        (
            lambda: masks.calibrate(CAUSAL, [X], 0.5, candidates=[masks.runtime.top_blocks(1) & ~masks.causal()]),
            MaskError,
            "top_blocks.* keeps nothing of attention '', of 8 queries and 8 keys: build takes no such mask",
        ),
        (
            lambda: masks.calibrate(ATTEND, ["x"], 0.5),
            InputError,
            "a sample is a tuple, a dict or a tensor, got str 'x'",
        ),
        (lambda: masks.calibrate(nn.Linear(4, 4), [X], 0.5), InputError, "Linear computes no attention by"),
        (lambda: masks.calibrate(ATTEND, [(X, 0.5)], 0.5), UnsupportedError, "attention '' has dropout_p=0.5"),
        (lambda: masks.calibrate(ATTEND, [X[0]], 0.5), UnsupportedError, r"q of shape \(1, 8, 4\); four dimensions"),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[3]),
            MaskError,
            "candidates are masks and rules of one head",
        ),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[]), MaskError, "candidates needs at least one mask"),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, candidates={}), MaskError, "candidates={} names no attention"),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates={3: [NOTHING]}),
            MaskError,
            "keys are module paths, got int",
        ),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates={"blocks.*": [masks.causal()]}),
            MaskError,
            r"candidates path 'blocks.\*' matches no attention of the model; there are: \(the model\)",
        ),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, candidates={"*": "masks"}), InputError, "must be masks and rules"),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[masks.sliding_tile((2, 8), (2, 2), (2, 4))]),
            MaskError,
            r"attention \(the model\), of 8 queries and 8 keys: .*candidates={\"path",
        ),
        (
            lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[masks.per_head([masks.causal()] * 2)]),
            MaskError,
            "candidates are masks and rules of one head for all batch entries, got per_head",
        ),
        (
            lambda: masks.calibrate(ATTEND, [X, X.expand(1, 2, 8, 4)], 0.5),
            InputError,
            "1 heads in one sample, 2 in another",
        ),
        (lambda: masks.calibrate(ATTEND, [X], 0.5, candidates=[masks.document([3])]), MaskError, "sum to 3"),
    ],
)
def test_what_is_refused(call, error, why):
    with pytest.raises(error, match=why):
        call()


class Video(nn.Module):
    """Tokens of a canvas attend to one another, then to a text."""

    def __init__(self):
        super().__init__()
        self.attn1, self.attn2 = (nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2))

    def forward(self, x, text):
        x = x + self.attn1(x, x, x, need_weights=False)[0]
        return x + self.attn2(x, text, text, need_weights=False)[0]


def test_candidates_by_path():
    tiles = masks.sliding_tile((8, 8), (4, 4), (4, 4), order="row-major")
    torch.manual_seed(3)
    model, sample = Video().eval(), (torch.randn(1, 64, 16), torch.randn(1, 5, 16))
    found = masks.calibrate(model, [sample], 0.6, candidates={"attn1": [tiles]})
    assert list(found) == ["attn1"] and found.density <= 0.6
    engine = stof_tvm.build(model, QUICK_LLVM, sample, mask=found, tuning_logs=False)
    assert {row.site: row.mask == "none" for row in engine.report().sites} == {"attn1": False, "attn2": True}
    everywhere = masks.calibrate(model, [sample], 0.6, candidates={"*": None, "attn1": [tiles]})
    assert sorted(everywhere) == ["attn1", "attn2"]


def test_the_last_path_counts():
    torch.manual_seed(3)
    model, sample = Video().eval(), (torch.randn(1, 8, 16), torch.randn(1, 8, 16))
    by_path = {"attn1": [masks.sliding_window(1)], "*": [masks.padding([2])]}
    found = masks.calibrate(model, [sample], 0.3, candidates=by_path)
    assert "sliding_window(1)" not in repr(found["attn1"]) and "padding" in repr(found["attn1"])
