"""Engines that find their masks: equal to `sparse_attention` with the same rules, in models, by path, saved."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.masks.runtime.rule import for_rule
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rules.rule_models import EVERY_RULE, LENGTH, RULES, Attend, Decoder, Layer, hidden, tensors
from tir_kernels.errors import InputError, MaskError, NotRewrittenError, UnsupportedError

TOP = EVERY_RULE["top_blocks"]


def close(actual, expected, dtype=torch.float32):
    torch.testing.assert_close(actual, expected, atol=16 * torch.finfo(dtype).eps, rtol=0)


def build(model, args, mask, **how):
    engine = stof_tvm.build(model, QUICK_LLVM, args, mask, **how)
    assert how or engine.report().verification.result == "passed"
    return engine


@pytest.fixture(scope="module")
def decoder():
    """A decoder with a rule in its first layer and a window in the second."""
    mask = {"layers.*": masks.sliding_window(20), "layers.0": TOP}
    return build(Decoder(), (hidden(),), mask)


@pytest.mark.parametrize("name", EVERY_RULE)
def test_every_rule_finds_its_blocks_in_each_call(name):
    rule = EVERY_RULE[name]
    engine = build(Attend(), tensors(), rule)
    for seed in (1, 2):
        q, k, v = tensors(seed)
        close(engine(q, k, v), Attend(rule=rule)(q, k, v))
        found = engine.found_blocks()[""]
        assert torch.equal(found.block_map, rule.block_map(q, k))
        assert found.density == pytest.approx(rule.mask(q, k).density(LENGTH), rel=1e-6)


@pytest.mark.parametrize(("scale", "name"), [(0.7, "xattention_of_all"), (-0.4, "own")])
def test_the_rule_sees_the_scores_of_another_scale(scale, name):
    rule = EVERY_RULE[name]
    engine = build(Attend(scale=scale), tensors(), rule)
    q, k, v = tensors(1)
    close(engine(q, k, v), Attend(scale=scale, rule=rule)(q, k, v))
    assert not torch.equal(engine.found_blocks()[""].block_map, rule.block_map(q, k))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [60.0, 0.2])
def test_another_scale_in_half_precision(dtype, scale):
    """The engine finds the blocks that `sparse_attention` and `masks.recall` find."""
    rule, (q, k, v) = RULES.top_blocks(1, block=32), tensors(dtype=dtype)
    q, k = q * 100, k / 100
    engine = build(Attend(scale=scale), (q, k, v), rule)
    close(engine(q, k, v), Attend(scale=scale, rule=rule)(q, k, v), dtype)
    found = engine.found_blocks()[""].block_map
    assert torch.equal(found, rule.block_map(*for_rule(q, k, scale)))
    assert (found != rule.block_map(q.float() * (4 * scale), k.float())).float().mean() < 0.02


def test_a_mask_for_each_head_beside_a_rule():
    mask = masks.per_head([masks.sliding_window(n) for n in (5, 20, 60, 140)])
    rule = RULES.rule(lambda q, k: torch.ones(1, 1, 3, 3, dtype=torch.bool, device=q.device)) & mask
    engine = build(Attend(True), tensors(), rule)
    q, k, v = tensors(1)
    close(engine(q, k, v), Attend(True, rule=rule)(q, k, v))
    kept = (mask & masks.causal()).density(LENGTH)
    assert engine.found_blocks()[""].density == pytest.approx(kept, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_causal_decoder_in_half_precision(dtype):
    engine = build(Decoder((None,), dtype), (hidden(dtype=dtype),), TOP)
    row = engine.report().rewritten[0]
    assert (row.rule, row.block_map, row.mask) == ("top_blocks(2, block=32)", (2, 4, 5, 5), "causal()")


@torch.no_grad()
def test_rules_by_path(decoder):
    x = hidden(1)
    everywhere = masks.runtime.rule(lambda q, k: torch.ones(1, 1, 3, 3, dtype=torch.bool))
    expected = Decoder((TOP, everywhere & masks.sliding_window(20)))
    expected.load_state_dict(Decoder().state_dict())
    close(decoder(x), expected(x))
    assert decoder.found_blocks().keys() == {"layers.0.attend"}
    assert [row.rule for row in decoder.report().rewritten] == ["top_blocks(2, block=32)", None]


def test_the_report_names_rule_block_and_operators(decoder):
    decoder(hidden(1))
    told = str(decoder.report())
    assert "top_blocks(2, block=32) keeps blocks of 32×32 of the mask, found in each call by" in told
    assert "matmul" in told and "topk" in told
    density = decoder.found_blocks()["layers.0.attend"].density
    assert f"kept in the last call: layers.0.attend {density:.1%}" in told
    assert "blocks that rules found: as PyTorch" in decoder.report().verification.detail


def test_a_saved_engine_finds_blocks(decoder, tmp_path):
    decoder.save(tmp_path / "decoder.stof")
    loaded = stof_tvm.load(tmp_path / "decoder.stof")
    assert not loaded.found_blocks()
    assert torch.equal(loaded(hidden(3)), decoder(hidden(3)))
    ours, theirs = (x.found_blocks()["layers.0.attend"] for x in (decoder, loaded))
    assert ours.density == theirs.density and torch.equal(ours.block_map, theirs.block_map)
    assert loaded.report().rewritten == decoder.report().rewritten


class Counted(torch.nn.Module):
    """A layer beside a state: results of rules come after those that are copied into states."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = Layer()
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x):
        self.calls.add_(1)
        return self.layer(x), self.calls * 2


@torch.no_grad()
def test_states_beside_a_rule():
    engine = build(Counted().eval(), (hidden(),), TOP)
    expected = Counted().eval()
    expected.layer.attend.rule = TOP
    for _ in range(2):
        for actual, wanted in zip(engine(hidden(1)), expected(hidden(1)), strict=True):
            close(actual, wanted)
    assert torch.equal(engine.state["calls"], torch.full((3,), 2.0))
    assert engine.found_blocks()["layer.attend"].block_map.shape == (2, 4, 5, 5)


def test_each_shape_of_a_range_traces_the_rule():
    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in "qkv"}
    engine = stof_tvm.build(Attend(), QUICK_LLVM, tensors(), TOP, dynamic_shapes=shapes, lazy=True)
    for n in (LENGTH, 70):
        q, k, v = tensors(n, n)
        close(engine(q, k, v), Attend(rule=TOP)(q, k, v))


@torch.no_grad()
def test_a_call_of_the_verification_is_not_the_last_one():
    engine = build(Attend(), tensors(), TOP)
    assert not engine.found_blocks() and "kept in the last call" not in str(engine.report())
    engine(*tensors())
    assert engine.found_blocks().keys() == {""} and "kept in the last call" in str(engine.report())


def test_torch_compile():
    compiled = torch.compile(Attend(True), backend="stof", options={"mask": TOP, "target": QUICK_LLVM})
    q, k, v = tensors(1)
    close(compiled(q, k, v), Attend(True, rule=TOP)(q, k, v))


def test_one_call_of_many_keys():
    """A single query after a prompt, whose keys are inputs."""
    q, k, v = tensors()
    engine = build(Attend(), (q[:, :, :1], k, v), TOP)
    close(engine(q[:, :, :1], k, v), Attend(rule=TOP)(q[:, :, :1], k, v))
    with pytest.raises(MaskError, match=r"attention \(the model\): vertical_slash is for prompts"):
        build(Attend(), (q[:, :, :1], k, v), EVERY_RULE["vertical_slash"])


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"replaceable_masks": True}, "leave replaceable_masks out"),
        ({"without_padding": True}, "leave it out"),
        ({"mesh": "ranks"}, "leave mesh out"),
        ({"dynamic_shapes": {"x": {1: torch.export.Dim("n", max=512)}}}, "lazy=True compiles each shape"),
    ],
)
def test_what_does_not_go_with_rules(how, rule):
    with pytest.raises(UnsupportedError, match=f"top_blocks.* finds its blocks from q and k in each call.*{rule}"):
        build(Decoder(), (hidden(),), TOP, **how)


def test_a_rule_without_a_kernel_is_refused_by_name():
    """No kernel of GPUs takes heads of 12, whatever the mask."""
    heads_of_12 = tuple(x[..., :12].contiguous() for x in tensors(dtype=torch.float16))
    with pytest.raises(UnsupportedError, match="no kernel keeps the blocks that top_blocks.*block-wise: "):
        stof_tvm.build(Attend(), "cuda -arch=sm_80", heads_of_12, TOP, verify=False)


def test_a_rule_reaches_an_attention():
    with pytest.raises(MaskError, match="'other' matches no attention"):
        build(Decoder(), (hidden(),), {"other": TOP})
    wide = tuple(x.repeat(1, 1, 1, 20) for x in tensors())
    with pytest.raises((NotRewrittenError, UnsupportedError), match="head_dim=320 exceeds"):
        build(Attend(), wide, TOP)


class Cached(torch.nn.Module):
    """A step of a decoder over keys that it keeps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("keys", torch.zeros(2, 2, LENGTH, 16))

    def forward(self, q, k, at):
        self.keys.index_copy_(2, at, k)
        return torch.nn.functional.scaled_dot_product_attention(q, self.keys, self.keys, enable_gqa=True)


def test_caches_are_refused():
    q, k, _ = tensors(length=1)
    with pytest.raises(UnsupportedError, match="over a cache that the model updates, where top_blocks"):
        build(Cached(), (q, k, torch.tensor([3])), TOP)


def test_masks_of_replaceable_engines_are_no_rules(decoder):
    engine = build(Attend(), tensors(), masks.sliding_window(9), replaceable_masks=True)
    with pytest.raises(MaskError, match="is a rule"):
        engine.with_mask(TOP)
    with pytest.raises(InputError, match="fixed"):
        decoder.with_mask(masks.causal())
