"""Layers with windows are computed for the rows that lead to what is read, and stay whole where that is not known."""

import functools
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

import stof_tvm
from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import Bindings, shape_of
from relax_passes.pipeline import run_pipeline
from stof_tvm import compiler, masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.read_rows import layers
from tests.relax_passes.read_rows.layers import HEADS, WIDTH, Layer
from tests.relax_passes.read_rows.programs import product_rows

BATCH, LENGTH, WINDOW = 2, 48, 7
BACK, AROUND = masks.sliding_window(WINDOW, causal=True), masks.sliding_window(WINDOW)
LEAST, MOST = 40, LENGTH - 1  # of a row that is given at run time
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
slow = pytest.mark.slow


class Deep(nn.Module):
    """Three layers, x (BATCH, LENGTH, WIDTH), and what `select(hidden, index)` reads of the last, index int64 (2,)."""

    def __init__(self, select, causal=True, kv_heads=2, own_mask=None):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(kv_heads, causal, own_mask) for _ in range(3))
        self.norm, self.head, self.select = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5), select

    def forward(self, x, index):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.select(self.norm(x), index))


def last(x, index):
    return x[:, -1:]


def given(least, most):
    """A row between two known ones."""
    return lambda x, index: x.index_select(1, index[:1].clamp(least, most))


bounded = given(LEAST, MOST)


def args(*rows):
    return X, torch.tensor(rows or (43, 2))


@functools.cache
def imported(model, example=None):
    """The model's import, which builds with several masks and both kinds of tests have in common."""
    return import_model(model.eval(), example or args(), {})


@functools.cache
def deep(select, causal=True, kv_heads=2, own_mask=None):
    """The same model for the same arguments."""
    return Deep(select, causal, kv_heads, own_mask).eval()


def program(model, mask=None, example=None):
    """The attentions and the rows of the products, after the pass."""
    mod = run_pipeline(imported(model, example).mod, QUICK_LLVM, SiteMasks(mask, takes_rules=True), until="read_rows")
    calls = [match_attention(mod, value) for value in Bindings(mod["main"]).values.values()]
    return [call for call in calls if call is not None], product_rows(mod)


def sizes(call) -> tuple:
    """(queries, keys, first row) of an attention."""
    return shape_of(call.q)[2], shape_of(call.k)[2], call.first_row


def built(model, mask=None):
    """Verified engines, with the (queries, keys, first row) of each attention."""
    with mock.patch.object(compiler, "import_model", lambda model, *given, **options: imported(model)):
        engine = stof_tvm.build(model, QUICK_LLVM, args(), mask, tuning_logs=False)
    report = engine.report()
    assert report.verification.result == "passed"
    return engine, [(site.shape.q_len, site.shape.kv_len, site.first_row) for site in report.rewritten]


def before(*counts):
    """What attentions have, read at the last of rows: these numbers of queries, and a window of keys before them."""
    return [(count, count + WINDOW, WINDOW) for count in counts]


CASES = {  # how it is read, of a causal model or another, its mask, and what its attentions have
    "the last row": (last, True, BACK, before(15, 8, 1)),
    "some last rows": (lambda x, index: x[:, -3:], True, BACK, before(17, 10, 3)),
    "a row of run time": (bounded, True, BACK, before(15, 8, 1)),
    "rows inside": (lambda x, index: x[:, 22:24], True, BACK, before(16, 9, 2)),
    "rows inside, by index": (lambda x, index: x[:, torch.tensor([22, 23])], True, BACK, before(16, 9, 2)),
    "keys on both sides": (lambda x, index: x[:, 24:26], False, AROUND, [(30, 44, 7), (16, 30, 7), (2, 16, 7)]),
    "keys behind": (
        lambda x, index: x[:, 4:5],
        False,
        AROUND & ~masks.causal(),
        [(15, 22, 0), (8, 15, 0), (1, 8, 0)],
    ),
    "the first row": (lambda x, index: x[:, 0], True, BACK, [(1, 1, 0)] * 3),
    "rows near the start": (lambda x, index: x[:, 9:11], True, BACK, [(11, 11, 0), (9, 11, 2), (2, 9, 7)]),
    "rows near the end": (
        lambda x, index: x[:, 40:],
        False,
        masks.sliding_window(3),
        [(14, 17, 3), (11, 14, 3), (8, 11, 3)],
    ),
    "two reads": (lambda x, index: x[:, -1] + x[:, -3], True, BACK, before(17, 10, 3)),
    "a window of one token": (last, True, masks.sliding_window(0), [(1, 1, 0)] * 3),
    "a dilated window": (last, True, masks.dilated_window(2, 3), [(13, 19, 6), (7, 13, 6), (1, 7, 6)]),
    "a window for each head": (
        last,
        True,
        masks.per_head([masks.sliding_window(n) for n in (7, 0, 3, 5)]),
        before(15, 8, 1),
    ),
    "a function": (last, True, lambda b, h, q, k: (q >= k) & (q - k < 5), [(9, 13, 4), (5, 9, 4), (1, 5, 4)]),
    "a function for each head": (
        last,
        True,
        lambda b, h, q, k: (q >= k) & (q - k < 5 + h),
        before(15, 8, 1),
    ),
    "other windows in other layers": (
        last,
        True,
        {"layers.0": masks.sliding_window(4), "layers.1": BACK, "layers.2": masks.sliding_window(2)},
        [(10, 14, 4), (3, 10, 7), (1, 3, 2)],
    ),
}


QUICK = "the last row", "a row of run time", "keys on both sides", "rows near the start", "a function for each head"


@pytest.mark.parametrize("name", CASES)
def test_layers_have_the_rows_that_windows_lead_to(name):
    select, causal, mask, expected = CASES[name]
    model = deep(select, causal)
    calls, rows = program(model, mask)
    assert [sizes(call) for call in calls] == expected
    for n, (queries, keys, _) in enumerate(expected):
        of_layer = BATCH * queries, BATCH * keys, BATCH * keys, queries, *[BATCH * queries] * 3
        assert rows[7 * n : 7 * n + 7] == [*of_layer]  # q, k, v, attention, out and the MLP's two
    assert rows[21:] == [model.select(X, torch.tensor([43, 2]))[..., 0].numel()]


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=slow) for name in CASES])
def test_results_are_those_of_pytorch(name):
    select, causal, mask, expected = CASES[name]
    assert built(deep(select, causal), mask)[1] == expected


def test_notes_tell_what_is_computed():
    report = built(deep(last), BACK)[0].report()
    for site, queries in zip(report.rewritten, (15, 8, 1), strict=True):
        note = f"computed for {queries} of its 48 queries, of {queries + WINDOW} keys: nothing reads the others"
        assert note in site.notes


@torch.no_grad()
def test_rows_change_from_call_to_call():
    """At both bounds, between them, and where a bound is what counts."""
    engine, _ = built(deep(bounded), BACK)
    plain = Deep(bounded, causal=False, own_mask=BACK.dense(LENGTH)).eval()
    for row in (LEAST, 43, MOST, 0, -5, 1000):
        torch.testing.assert_close(engine(*args(row, 2)), plain(*args(row, 2)), atol=5e-6, rtol=1e-5)


OWN = masks.sliding_window(5).dense(LENGTH)
PER_HEAD = torch.stack([masks.sliding_window(n).dense(LENGTH) for n in (1, 4, 0, 2)])[None]
OWNS = {  # the model's own mask, one that is given, and how far both reach
    "causal": (OWN.tril(), None, (5, 0)),
    "on both sides": (OWN, None, (5, 5)),
    "of each head": (PER_HEAD, None, (4, 4)),
    "causality that is given": (OWN, masks.causal(), (5, 0)),
    "a window that is given": (OWN[None, None], masks.sliding_window(3), (3, 3)),
}


@pytest.mark.parametrize("name", OWNS)
@pytest.mark.parametrize("how", ["known", "given"])
def test_masks_of_the_models_own(name, how):
    """Constants that keep the same at each distance, beside a mask that is given."""
    own, mask, (left, right) = OWNS[name]
    count = 2 if how == "known" else 1
    select = (lambda x, index: x[:, 20:22]) if how == "known" else given(20, 27)
    expected = [(count + n * (left + right), count + (n + 1) * (left + right)) for n in (2, 1, 0)]
    first = None if mask is None else left
    calls, _ = program(deep(select, causal=False, own_mask=own), mask)
    assert [sizes(call) for call in calls] == [(*pair, first) for pair in expected]


@torch.no_grad()
@pytest.mark.parametrize("name", ["of each head", pytest.param("causality that is given", marks=slow)])
def test_results_with_masks_of_the_models_own(name):
    own, mask, _ = OWNS[name]
    select = given(20, 27)
    engine, _ = built(deep(select, causal=False, own_mask=own), mask)
    both = own if mask is None else own & mask.dense(LENGTH)
    plain = Deep(select, causal=False, own_mask=both).eval()
    for row in (20, 24, 27):
        torch.testing.assert_close(engine(*args(row, 2)), plain(*args(row, 2)), atol=5e-6, rtol=1e-5)


def test_the_models_own_causality_within_a_window():
    """Without a mask for the attention it is a constant, or words; with one it stands beside it."""
    calls, _ = program(deep(last, causal=True), masks.sliding_window(WINDOW))
    assert [sizes(call) for call in calls] == before(15, 8, 1)
    assert [call.causal for call in calls] == ["bottom-right", "bottom-right", ""]


ALMOST = OWN.clone()
ALMOST[24, 2] = True
RANDOM = torch.rand(BATCH, 1, LENGTH, LENGTH, generator=torch.Generator().manual_seed(1)) > 0.4
RANDOM |= torch.eye(LENGTH, dtype=torch.bool)
BIAS = torch.randn(LENGTH, LENGTH, generator=torch.Generator().manual_seed(2))
NOT = {  # how it is read, what the model is like, and its mask
    "a mask that is not by distance": (last, dict(), BACK | masks.global_tokens([5])),
    "a head that is not by distance": (last, dict(), masks.per_head([BACK] * 3 + [masks.global_tokens([5])])),
    "no window": (last, dict(), None),
    "a causal mask that is given": (last, dict(causal=False), masks.causal()),
    "a window on one side of two": (lambda x, index: x[:, 24:26], dict(causal=False), masks.causal() | AROUND),
    "a window of almost all": (lambda x, index: x[:, 40:], dict(causal=False), masks.sliding_window(39)),
    "a row that is not bounded": (lambda x, index: x.index_select(1, index[:1]), dict(), BACK),
    "a row with keys that may lie outside": (given(WINDOW - 1, MOST), dict(), BACK),
    "a row bounded on one side": (lambda x, index: x.index_select(1, index[:1].clamp(min=40)), dict(), BACK),
    "a row for each entry": (lambda x, index: x[torch.arange(BATCH), index.clamp(LEAST, MOST)], dict(), BACK),
    "two rows of run time": (lambda x, index: bounded(x, index) + bounded(x, index[1:]), dict(), BACK),
    "a row of run time and a known one": (lambda x, index: bounded(x, index) + x[:, -1:], dict(), BACK),
    "every second row": (lambda x, index: x[:, 30:48:2], dict(), BACK),
    "one that is not the same at each distance": (
        lambda x, index: x[:, 24:25],
        dict(causal=False, own_mask=ALMOST),
        None,
    ),
    "a mask of each entry": (last, dict(causal=False, own_mask=RANDOM), BACK),
    "a bias": (last, dict(causal=False, own_mask=BIAS), BACK),
    "the mean beside a row": (lambda x, index: x[:, -1:] + x.mean(1, keepdim=True), dict(), BACK),
}
QUICK_NOT = "one that is not the same at each distance", "a row with keys that may lie outside", "two rows of run time"


@pytest.mark.parametrize("name", NOT)
def test_what_is_not_known_stays_whole(name):
    select, about, mask = NOT[name]
    calls, _ = program(deep(select, **about), mask)
    lengths = [sizes(call)[:2] for call in calls]
    assert lengths[:2] == [(LENGTH, LENGTH)] * 2 and lengths[2][1] == LENGTH


@pytest.mark.parametrize("name", [name if name in QUICK_NOT else pytest.param(name, marks=slow) for name in NOT])
def test_results_of_what_stays_whole(name):
    select, about, mask = NOT[name]
    built(deep(select, **about), mask)


class TwoResults(Deep):
    """Also what the first layer computes is a result."""

    def forward(self, x, index):
        first = x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(self.select(x, index)), first


def test_layers_before_one_that_is_read_otherwise_are_whole():
    assert built(TwoResults(last).eval(), BACK)[1] == [(LENGTH, LENGTH, None), *before(8, 1)]


@pytest.mark.parametrize("rows", [slice(0, 1), slice(0, 3), slice(3, 5)])
def test_rows_whose_window_lies_before_the_first_key(rows):
    """A mask of these rows alone may keep nothing, which is an error."""
    mask = masks.sliding_window(5, causal=True) & ~masks.sliding_window(3)
    _, found = built(Deep(lambda x, index: x[:, rows], causal=False).eval(), mask)
    assert found[-1] == ((2, 5, 3) if rows.start else (LENGTH, LENGTH, None))


def written_out(q, k, v, mask, is_causal, enable_gqa, cap=2.0, sinks=(0.5, -1.0, 0.0, 2.0)):
    """Attention with a cap of scores and a sink of each head."""
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    scores = cap * torch.tanh(q @ k.mT * WIDTH**-0.5 / cap)
    keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = torch.where(keep, scores, -torch.inf)
    sink = torch.tensor(sinks).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1] @ v


def test_scores_with_a_cap_and_a_sink(monkeypatch):
    monkeypatch.setattr(layers, "F", SimpleNamespace(scaled_dot_product_attention=written_out))
    model = Deep(bounded).eval()  # none that was imported with another attention
    calls, _ = program(model, BACK)
    assert all(call.sink is not None and call.softcap == 2 for call in calls)
    assert built(model, BACK)[1] == before(15, 8, 1)
