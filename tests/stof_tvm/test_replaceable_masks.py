"""Engines whose masks are replaced: right for every mask, without compiling, saved or not, for CPUs and GPUs."""

import dataclasses
import threading

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm import compiler, masks
from stof_tvm.errors import ArtifactError, InputError, MaskError, NotRewrittenError, UnsupportedError
from stof_tvm.mask_arrays import MaskArrays
from stof_tvm.saving.artifact import load_artifact
from tests.stof_tvm.test_states import Decoder, token

LENGTH, WIDTH, HEADS = 72, 32, 4
REPLACEMENTS = [
    masks.causal(),
    masks.document([30, 1, 41]),
    masks.bigbird(block=8),
    masks.strided(5),
    masks.dilated_window(3, 2) | masks.global_tokens([0]),
    masks.per_head([masks.causal(), masks.sliding_window(2), masks.a_shape(1, 9), masks.strided(7)]),
    masks.padding([17, 72]),
    masks.from_tensor(torch.ones(LENGTH, LENGTH).tril(-3) == 1),  # three rows keep nothing
    None,
]


class Layers(nn.Module):
    """Two attentions: one causal by itself with grouped heads, one with a constant mask and a run-time bias."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Attention(is_causal=True, kv_heads=2), Attention(is_causal=False, kv_heads=HEADS)

    def forward(self, x, bias):
        return self.second(self.first(x), bias)


class Attention(nn.Module):
    def __init__(self, is_causal: bool, kv_heads: int):
        super().__init__()
        self.is_causal, self.kv_heads = is_causal, kv_heads
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * kv_heads * WIDTH // HEADS)
        self.register_buffer("keep", torch.arange(LENGTH)[None] < 61)

    def forward(self, x, bias=None):
        size = WIDTH // HEADS
        q = self.q(x).unflatten(2, (HEADS, size)).transpose(1, 2)
        k, v = self.kv(x).unflatten(2, (2, self.kv_heads, size)).permute(2, 0, 3, 1, 4).unbind(0)
        if bias is not None:
            bias = bias.masked_fill(~self.keep, float("-inf"))
        y = nn.functional.scaled_dot_product_attention(q, k, v, bias, is_causal=self.is_causal, enable_gqa=True)
        return y.transpose(1, 2).flatten(2)


def expected(model, mask, x, bias, second=...):
    """What PyTorch gives with masks, each a dense tensor: `mask` for the first attention, `second` for the other."""
    actual = nn.functional.scaled_dot_product_attention
    remaining = iter((mask, mask if second is ... else second))

    def masked(q, k, v, attn_mask=None, is_causal=False, enable_gqa=False):
        given = next(remaining)
        keep = torch.ones(q.shape[0], HEADS, LENGTH, LENGTH, dtype=torch.bool)
        keep = keep if given is None else keep & given.dense(LENGTH)
        keep = keep.tril() if is_causal else keep
        scores = torch.zeros(keep.shape).masked_fill(~keep, float("-inf"))
        return actual(q, k, v, scores if attn_mask is None else scores + attn_mask, enable_gqa=enable_gqa)

    nn.functional.scaled_dot_product_attention = masked
    try:
        with torch.no_grad():
            return Layers.forward(model, x, bias)
    finally:
        nn.functional.scaled_dot_product_attention = actual


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Layers().eval()


@pytest.fixture(scope="module")
def call():
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, WIDTH), torch.randn(2, 1, 1, LENGTH)


@pytest.fixture(scope="module")
def engine(model, call):
    return stof_tvm.build(model, "llvm", call, masks.sliding_window(6), replaceable_masks=True)


@pytest.fixture(scope="module")
def loaded(engine, tmp_path_factory):
    path = tmp_path_factory.mktemp("masks") / "a.stof"
    engine.save(path)
    return stof_tvm.load(path)


@pytest.mark.parametrize("mask", REPLACEMENTS, ids=repr)
@pytest.mark.parametrize("which", ["engine", "loaded"])
def test_any_mask(which, mask, model, call, request, monkeypatch):
    first = request.getfixturevalue(which)
    monkeypatch.setattr(compiler, "_generate_code", None)  # nothing is compiled
    found = first.with_mask(mask)(*call)
    assert (found - expected(model, mask, *call)).abs().max() < 1e-5


def test_the_first_mask_stays(engine, loaded, model, call):
    wanted = expected(model, masks.sliding_window(6), *call)
    other = engine.with_mask(masks.causal())
    assert (other(*call) - wanted).abs().max() > 1e-3
    for of_the_first in (engine, loaded, other.with_mask(masks.sliding_window(6))):
        assert (of_the_first(*call) - wanted).abs().max() < 1e-5


def test_masks_by_path(engine, model, call):
    """An attention without a mask of its own has the model's only, whatever was given before."""
    found = engine.with_mask({"second": masks.strided(4)})(*call)
    assert (found - expected(model, None, *call, second=masks.strided(4))).abs().max() < 1e-5


def test_a_replaced_mask_is_saved(engine, call, tmp_path):
    other = engine.with_mask(masks.document([50, 22]))
    other.save(tmp_path / "b.stof")
    again = stof_tvm.load(tmp_path / "b.stof")
    assert torch.equal(again(*call), other(*call))
    assert [row.mask for row in again.report().sites] == [row.mask for row in other.report().sites]
    assert torch.equal(again.with_mask(masks.causal())(*call), engine.with_mask(masks.causal())(*call))


def test_the_report_tells_the_mask_that_is_applied(engine):
    report = engine.with_mask({"second": masks.strided(4)}).report()
    first, second = report.sites
    assert first.mask == "causal()" and second.mask.endswith("strided(4)") and second.density < 0.5
    assert all(row.notes.count("its mask was given later") == 1 for row in report.sites)
    assert report.verification.result == "skipped" and "first mask only" in report.verification.detail
    assert engine.report().verification.result == "passed"


def test_a_tensor_is_read_when_it_is_given(engine, model, call):
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(5)
    other = engine.with_mask(keep)
    wanted = expected(model, masks.from_tensor(keep.clone()), *call)
    keep.zero_()
    assert (other(*call) - wanted).abs().max() < 1e-5


def test_threads_may_have_masks_of_their_own(engine, model, call):
    windows = range(1, 9)
    wanted = [expected(model, masks.sliding_window(w), *call) for w in windows]
    found: dict[int, torch.Tensor] = {}

    def work(number, window):
        for _ in range(3):
            found[number] = engine.with_mask(masks.sliding_window(window))(*call)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(windows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((found[number] - x).abs().max() < 1e-5 for number, x in enumerate(wanted))


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (masks.document([8, 8]), "'first': document lengths sum to 16, must sum to q_len=72"),
        ({"third": masks.causal()}, "matches no attention of the model"),
        (masks.causal() & ~masks.causal(), "'first': the mask .* keeps nothing"),
        (masks.per_head([masks.causal()] * 3), r"\(batch, heads\) = \(1, 3\)"),
        (torch.ones(LENGTH, LENGTH), "must be bool"),
    ],
)
def test_what_does_not_fit_is_refused(mask, words, engine):
    with pytest.raises(MaskError, match=words):
        engine.with_mask(mask)


def test_fixed_masks_say_so(model, call):
    fixed = stof_tvm.build(model, "llvm", call, masks.sliding_window(6), verify=False)
    with pytest.raises(InputError, match="replaceable_masks=True"):
        fixed.with_mask(masks.causal())


def test_ranges_have_engines_of_their_own():
    x, dynamic = torch.randn(2, 8), {"input": {0: torch.export.Dim("batch", min=1, max=4)}}
    with pytest.raises(InputError, match=r"with lazy=True each engine of a range has with_mask"):
        stof_tvm.build(nn.Linear(8, 8), "llvm", (x,), dynamic_shapes=dynamic, replaceable_masks=True)


class Filled(nn.Module):
    """Its own mask fills with a finite number: beside another mask, rows of nothing but fills mean something else."""

    def forward(self, q):
        scores = q @ q.transpose(-1, -2)
        return torch.softmax(scores.masked_fill(torch.ones(16, 16).triu(1) == 1, -1e9), -1) @ q


class Dense(nn.Module):
    """Weights with a second reader: no kernel computes them."""

    def forward(self, q):
        weights = torch.softmax(q @ q.transpose(-1, -2), -1)
        return weights @ q, weights


def test_masks_that_depend_on_the_given_one_are_refused():
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(UnsupportedError, match="masks by finite numbers"):
        stof_tvm.build(Filled().eval(), "llvm", (q,), masks.sliding_window(3), replaceable_masks=True)
    dense = stof_tvm.build(Dense().eval(), "llvm", (q,), replaceable_masks=True)
    with pytest.raises((NotRewrittenError, InputError)):  # no kernel takes a mask
        dense.with_mask(masks.causal())


def test_masks_of_caches():
    """Rows are those of positions, whatever mask is given later; a plan of rows for a GPU belongs to one mask."""
    torch.manual_seed(0)
    model, window = Decoder().eval(), masks.sliding_window(3, causal=True)
    first = stof_tvm.build(model, "llvm", (token(),), replaceable_masks=True)
    fixed = stof_tvm.build(model, "llvm", (token(),), window)
    other = first.with_mask(window)
    for number in range(6):
        assert torch.equal(other(token(number)), fixed(token(number)))
    with pytest.raises(UnsupportedError, match="over a cache: on a GPU its mask cannot be replaced"):
        stof_tvm.build(Decoder().half().eval(), "cuda -arch=sm_80", (token().half(),), replaceable_masks=True)


def test_a_part_of_a_cache_can_have_no_mask_later():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("keys", torch.zeros(1, 2, 16, 8))

        def forward(self, q, at):
            self.keys.index_copy_(2, at, q)
            return nn.functional.scaled_dot_product_attention(q, self.keys[:, :, :8], self.keys[:, :, :8])

    call = torch.randn(1, 2, 1, 8), torch.tensor([3])
    with pytest.raises(UnsupportedError, match="no mask can be given to it later: .*; leave replaceable_masks out"):
        stof_tvm.build(Part().eval(), "llvm", call, replaceable_masks=True)


@pytest.mark.parametrize(
    "change", [{"first": 1}, {"count": 0}, {"causal": "left"}, {"config": "{}"}, {"sizes": [1]}, {"first_row": 1}]
)
def test_a_description_that_is_none_is_refused(change, loaded, engine):
    data = engine._masks.to_json()
    assert MaskArrays.from_json(data, engine._masks.target).to_json() == data
    with pytest.raises(ArtifactError, match="description of its mask arrays is malformed"):
        MaskArrays.from_json([data[0] | change, *data[1:]], engine._masks.target)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_gpus(arch, call):
    """Kernels are those of any mask, and the arrays of other masks have the dtypes and ranks that they take."""
    torch.manual_seed(0)
    model, half = Layers().half().eval(), [x.half() for x in call]
    engine = stof_tvm.build(model, f"cuda -arch={arch}", tuple(half), masks.strided(5), replaceable_masks=True)
    assert all(kernel.config.token_stride == 1 for kernel in engine._masks.kernels)
    for mask in REPLACEMENTS:
        other = engine.with_mask(mask)
        kinds = [[(x.dtype, x.shape[1:]) for x in e._arrays] for e in (engine, other)]
        assert kinds[0] == kinds[1]


def test_the_library_knows_no_mask(engine, tmp_path):
    """What is saved of the code is the same for every mask."""
    paths = [tmp_path / "a.stof", tmp_path / "b.stof"]
    engine.save(paths[0])
    engine.with_mask(masks.causal()).save(paths[1])
    first, second = (load_artifact(path).manifest for path in paths)
    assert first["mask_kernels"] == second["mask_kernels"] and first["masks"] != second["masks"]


def test_states_are_shared():
    """A view of an engine with states updates the same buffers; its attention is over the tokens of a call."""

    class Counting(Attention):
        def __init__(self):
            super().__init__(is_causal=False, kv_heads=HEADS)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return super().forward(x) * self.calls

    x = torch.randn(1, LENGTH, WIDTH)
    engine = stof_tvm.build(Counting().eval(), "llvm", (x,), replaceable_masks=True, verify=False)
    other = engine.with_mask(masks.causal())
    engine(x), other(x), engine(x)
    assert other.state["calls"].item() == 3 and dataclasses.is_dataclass(other.signature)
