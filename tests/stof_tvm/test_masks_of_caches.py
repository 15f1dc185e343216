"""Masks given to `build` for attentions over caches: a query has the row of its position, however keys are written."""

import math
import shutil

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import MaskError
from tests.models.quick_llvm import QUICK_LLVM

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 4, 2, 40, 8
SDPA = nn.functional.scaled_dot_product_attention
WINDOW = masks.sliding_window(5, causal=True)
MASKS = {
    "window": WINDOW,
    "sink": masks.a_shape(2, 4),
    "strided": masks.causal() & masks.strided(6),
    "documents": masks.causal() & masks.document([3, 9, 28]),
    "tensor": torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4,
    "per head": masks.per_head([WINDOW, masks.causal(), masks.a_shape(1, 2), masks.dilated_window(8, 2)]),
}


def by_sdpa(q, k, v, keep):
    return SDPA(q, k, v, attn_mask=keep, enable_gqa=True)


def by_softmax(q, k, v, keep):
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(SIZE)
    return torch.softmax(scores.masked_fill(~keep, -math.inf), -1) @ v


class Decoder(nn.Module):
    """Attention of new tokens over a cache; `given` is the mask as PyTorch applies it, by the rows of positions."""

    def __init__(self, attend=by_sdpa, write="index_copy", heads_last=False):
        super().__init__()
        self.attend, self.write, self.heads_last, self.given = attend, write, heads_last, None
        shape = (BATCH, LENGTH, KV_HEADS, SIZE) if heads_last else (BATCH, KV_HEADS, LENGTH, SIZE)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(shape))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, q, k, v):
        tokens, axis = q.shape[2], 1 if self.heads_last else 2
        at = torch.arange(tokens) + (3 if self.write == "slice" else self.position)
        caches = []
        for cache, new in ((self.keys, k), (self.values, v)):
            new = new.transpose(1, 2) if self.heads_last else new
            if self.write == "index_copy":
                cache.index_copy_(axis, at, new)
            elif self.write == "index":
                cache[(slice(None),) * axis + (at,)] = new
            else:
                cache[(slice(None),) * axis + (slice(3, 3 + tokens),)] = new
            caches.append(cache.transpose(1, 2) if self.heads_last else cache)
        self.position.add_(tokens)
        keep = torch.arange(LENGTH) <= at[:, None]
        return self.attend(q, *caches, keep if self.given is None else keep & self.given[..., at, :])


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(BATCH, heads, count, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS)]


def compared(mask, count=1, steps=6, **how):
    """An engine whose results over several calls are those of PyTorch with the mask."""
    model = Decoder(**how).eval()
    engine = stof_tvm.build(model, QUICK_LLVM, tuple(tokens(count)), mask)
    assert engine.report().verification.result == "passed"
    model.given = mask if isinstance(mask, torch.Tensor) else mask.dense(LENGTH)
    for step in range(steps):
        with torch.no_grad():
            torch.testing.assert_close(engine(*tokens(count, step)), model(*tokens(count, step)), atol=1e-5, rtol=1e-5)
    return engine


@pytest.mark.parametrize("name", MASKS)
def test_every_family_decodes(name):
    engine = compared(MASKS[name], steps=16, count=2 if name == "documents" else 1)
    (site,) = engine.report().sites
    dense = MASKS[name] if name == "tensor" else MASKS[name].dense(LENGTH)
    assert site.shape.has_positions and site.kernel == "row-wise" and site.first_row is None
    assert site.density == pytest.approx(dense.float().mean().item())
    assert "each query has the mask's row of its position" in str(engine.report())
    assert "2 updated in place (keys, values)" in str(engine.report())


@pytest.mark.parametrize(
    "how",
    [
        dict(write="index", count=3),
        dict(heads_last=True, count=5),
        dict(write="index", heads_last=True),
        dict(attend=by_softmax, count=2),
    ],
    ids=["index", "heads_last", "both", "softmax"],
)
def test_ways_to_write_a_cache(how):
    assert compared(MASKS["sink"], **how).report().sites[0].shape.has_positions


@pytest.mark.parametrize("count", [1, 6])
def test_constant_positions_are_rows(count):
    """A mask of Sq rows, without a part at run time; other positions of a model's own causal mask are cut from it."""
    (site,) = compared(WINDOW, count, write="slice", steps=2).report().sites
    assert site.first_row == 3 and not site.shape.has_positions
    kept = (WINDOW.dense(LENGTH) & masks.causal().dense(LENGTH))[3 : 3 + count]
    assert site.density == pytest.approx(kept.float().mean().item())


def test_a_saved_engine(tmp_path):
    engine = stof_tvm.build(Decoder().eval(), QUICK_LLVM, tuple(tokens(1)), WINDOW, verify=False)
    engine.save(tmp_path / "decoder.stof")
    again = stof_tvm.load(tmp_path / "decoder.stof")
    assert again.report().sites == engine.report().sites
    for step in range(3):
        assert torch.equal(again(*tokens(1, step)), engine(*tokens(1, step)))


def test_prompts_and_tokens_share_a_cache():
    """Twelve tokens at once, then one by one."""
    mask, (q, k, v) = MASKS["strided"], tokens(20)
    builds = [stof_tvm.build(Decoder().eval(), QUICK_LLVM, tuple(tokens(n)), mask) for n in (12, 1)]
    prompt, step = builds
    step.share_state(prompt)
    found = [prompt(*(x[:, :, :12] for x in (q, k, v)))]
    found += [step(*(x[:, :, n : n + 1] for x in (q, k, v))) for n in range(12, 20)]
    expected = SDPA(q, k, v, attn_mask=mask.dense(LENGTH)[:20, :20], enable_gqa=True)
    torch.testing.assert_close(torch.cat(found, 2), expected, atol=1e-5, rtol=1e-5)


def test_beyond_the_cache_rows_are_nan():
    engine = stof_tvm.build(Decoder().eval(), QUICK_LLVM, tuple(tokens(1)), WINDOW)
    engine.state["position"].fill_(LENGTH - 1)
    assert engine(*tokens(1)).isfinite().all()
    assert engine(*tokens(1)).isnan().all()


class Causal(nn.Module):
    """`is_causal` over a cache counts rows of the call: row r keeps keys 0 … r."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.randn(1, HEADS, LENGTH, SIZE, generator=torch.Generator().manual_seed(5)))
        self.given = None

    def forward(self, q, at):
        self.keys.index_copy_(2, at, q)
        if self.given is None:
            return SDPA(q, self.keys, self.keys, is_causal=True)
        keep = torch.ones(len(at), LENGTH, dtype=torch.bool).tril()
        out = SDPA(q, self.keys, self.keys, attn_mask=keep & self.given[at])
        return out


@torch.no_grad()
def test_masks_of_the_call_stay_masks_of_the_call():
    model = Causal().eval()
    q, at = torch.randn(1, HEADS, 4, SIZE), torch.tensor([1, 2, 30, 3])
    engine = stof_tvm.build(model, QUICK_LLVM, (q, at), WINDOW)
    assert engine.report().verification.result == "passed"
    model.given = WINDOW.dense(LENGTH)
    torch.testing.assert_close(engine(q, at), model(q, at), atol=1e-5, rtol=1e-5)
    assert not engine(q, at)[:, :, 2].any()  # row 30 of the window, row 2 of the call: nothing is left


class Cache(nn.Module):
    """An attention over a cache that is written, or read, in some way."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, 2, 16, SIZE, dtype=dtype))
        self.register_buffer("values", torch.zeros(1, 2, 16, SIZE))
        self.function = function

    def forward(self, q, at):
        keys, values = self.function(self, q, at)
        return SDPA(q, keys, values)


def both(self, at, also, q):
    self.keys.index_copy_(2, at, q)
    self.values.index_copy_(2, also, q)
    return self.keys, self.values


def written(self, q, at):
    self.keys.index_copy_(2, at, q)
    return self.keys


def a_prefix(self, q, at):
    return (written(self, q, at)[:, :, :8],) * 2


def new_keys_behind(self, q, at):
    return (torch.cat([written(self, q, at), q], 2),) * 2


def rolled(self, q, at):
    return (written(self, q, at).roll(-1, 2),) * 2


def flipped(self, q, at):
    return (written(self, q, at).flip(2),) * 2


def other_positions(self, q, at):
    return both(self, at, at + 1, q)


def values_of_the_call(self, q, at):
    keys = written(self, q, at)
    return keys, torch.cat([q] * 8, 2)


def one_more_key(self, q, at):
    self.keys.index_copy_(2, torch.cat([at, at[:1] + 1]), torch.cat([q, q[:, :, :1]], 2))
    return self.keys, self.keys


def added(self, q, at):
    self.keys.index_add_(2, at, q)
    return self.keys, self.keys


def written_twice(self, q, at):
    written(self, q, at)
    self.keys.index_copy_(2, at + 1, q)
    return self.keys, self.keys


def not_written(self, q, at):
    keys = self.keys * 1
    self.keys.mul_(2)
    return keys, keys


def along_the_heads(self, q, at):
    self.keys.index_copy_(1, at, self.keys[:, :2] + q.mean())
    return self.keys, self.keys


def of_each_head(self, q, at):
    index = torch.stack([at, at + 1])[None, :, :, None].expand(q.shape)
    self.keys.scatter_(2, index, q)
    return self.keys, self.keys


REFUSED = {
    a_prefix: "strided_slice stands between the cache and the attention",
    new_keys_behind: "concat stands between the cache and the attention",
    rolled: "take stands between the cache and the attention",
    flipped: "take stands between the cache and the attention",
    other_positions: "its keys and values are written at different positions",
    values_of_the_call: "concat stands between the cache and the attention",
    one_more_key: "3 tokens are written for 2 queries",
    added: r"new keys are combined with old ones \(add\)",
    written_twice: "the cache is written more than once",
    not_written: "multiply stands between the cache and the attention",
    along_the_heads: "its keys and values are not a whole cache in the order of its positions",
    of_each_head: "batch entries or heads have positions of their own",
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_other_caches_are_refused(function):
    """The message says why; without a mask they build."""
    model, inputs = Cache(function).eval(), (torch.randn(1, 2, 2, SIZE), torch.tensor([0, 1]))
    with pytest.raises(MaskError, match=rf"the attention \(the model\) reads a cache .*, but {REFUSED[function]}: let"):
        stof_tvm.build(model, QUICK_LLVM, inputs, WINDOW, verify=False)


def test_a_mask_of_the_calls_rows_does_not_fit():
    with pytest.raises(MaskError, match=r"shape \(2, 40\) does not broadcast to \(B, H, Sq, Skv\) = \(2, 4, 40, 40\)"):
        stof_tvm.build(Decoder().eval(), QUICK_LLVM, tuple(tokens(2)), torch.ones(2, LENGTH, dtype=torch.bool))


# -- GPUs ------------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Two attentions over caches of their own, at the same positions."""

    def __init__(self, length=512, size=16, constant=False):
        super().__init__()
        for name in ("keys0", "values0", "keys1", "values1"):
            self.register_buffer(name, torch.zeros(1, 2, length, size, dtype=torch.float16))
        self.constant = constant

    def forward(self, q, k, v, at):
        for layer in ("0", "1"):
            keys, values = getattr(self, f"keys{layer}"), getattr(self, f"values{layer}")
            if self.constant:
                keys[:, :, 8 : 8 + k.shape[2]], values[:, :, 8 : 8 + k.shape[2]] = k, v
            else:
                keys.index_copy_(2, at, k)
                values.index_copy_(2, at, v)
            q = SDPA(q, keys, values, enable_gqa=True)
        return q


def half(count):
    return *(torch.randn(1, heads, count, 16, dtype=torch.float16) for heads in (4, 2, 2)), torch.arange(count)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_gpu_engine_plans_once(arch, tmp_path):
    """One plan for both layers; its kernels and the attention compile, where nvcc is here."""
    engine = stof_tvm.build(Layers().eval(), f"cuda -arch={arch}", half(2), masks.a_shape(4, 100))
    operators = [name for row in engine.report().segments for name in row.operators]
    assert [operators.count(f"plan_{name}") for name in ("spans", "entries", "columns", "keep_bits", "work")] == [1] * 5
    assert operators.count("sparse_attention_row_wise") == 2
    assert all(site.shape.has_positions and site.kernel == "row-wise" for site in engine.report().sites)
    if shutil.which("nvcc") is not None:
        engine.save(tmp_path / "layers.stof")


def test_prompts_on_gpus_have_constant_positions():
    with pytest.raises(
        MaskError, match=r"its 17 queries stand there is known at run time only, but no kernel .*x\[:, "
    ):
        stof_tvm.build(Layers(), "cuda -arch=sm_80", half(17), WINDOW)
    (site, _) = stof_tvm.build(Layers(constant=True), "cuda -arch=sm_80", half(64), WINDOW).report().sites
    assert site.first_row == 8 and site.kernel == "block-wise"
