"""A rule where a mask is taken: sparse_attention, recall, and what refuses it."""

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import masks, sparse_attention
from stof_tvm.generation.masks_of_positions import masks_of_positions
from stof_tvm.given_masks import given_mask
from stof_tvm.transformers import set_mask
from tir_kernels.errors import InputError, MaskError

SIZES = (2, 4, 150, 32), (2, 2, 150, 32)


def tensors(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    q, k = (torch.randn(shape).to(dtype) for shape in SIZES)
    return q, k, torch.randn(SIZES[1]).to(dtype)


def peaks(q, k):
    """Blocks whose first query likes the first key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return q[:, :, ::64] @ k[:, :, ::64].transpose(-1, -2) > 0


def dense(q, k, v, keep):
    expected = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), keep, enable_gqa=True)
    return torch.where(keep.any(-1, keepdim=True), expected, 0.0)


def pairs(block_map):
    return block_map.repeat_interleave(64, -2).repeat_interleave(64, -1)[..., :150, :150]


def test_a_rule_of_ones_own():
    rule = masks.runtime.rule(peaks)
    for seed in (0, 1):  # the second call runs the first one's code
        q, k, v = tensors(seed=seed)
        out = sparse_attention(q, k, v, rule, enable_gqa=True)
        assert (out - dense(q, k, v, pairs(peaks(q, k)))).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_mask_is_an_upper_bound(dtype):
    rule, (q, k, v) = masks.runtime.rule(peaks) & masks.sliding_window(70) & masks.causal(), tensors(dtype)
    keep = pairs(peaks(q, k)) & (masks.sliding_window(70) & masks.causal()).dense(150)
    assert torch.equal(rule.mask(q, k).dense(150), keep)
    assert repr(masks.causal() & masks.runtime.rule(peaks)) == "rule(peaks) & causal()"
    assert repr(masks.runtime.rule(peaks) & ~masks.causal() & (masks.bigbird() | masks.causal())) == (
        "rule(peaks) & ~causal() & (bigbird() | causal())"
    )
    out, lse = sparse_attention(q, k, v, rule, enable_gqa=True, return_lse=True)
    assert (out - dense(q, k, v, keep)).abs().max() < 8 * torch.finfo(dtype).eps
    assert torch.equal(lse.isneginf(), ~keep.any(-1)) and not keep.any(-1).all()
    assert (out[~keep.any(-1)] == 0).all()


@pytest.mark.parametrize("scale", [0.01, 0.6, -0.3])
def test_a_rule_sees_the_scores_of_the_attention(scale):
    """Weights, and signs, depend on the scale."""
    rule, (q, k, v) = masks.runtime.xattention(mass=0.6, causal=False), tensors()
    q = 3 * q
    chosen = rule.block_map(q * (scale * 32**0.5), k)
    assert not torch.equal(chosen, rule.block_map(q, k))
    expected = dense(q * (scale * 32**0.5), k, v, pairs(chosen))
    assert (sparse_attention(q, k, v, rule, scale=scale, enable_gqa=True) - expected).abs().max() < 2e-5
    kept = masks.recall(pairs(chosen), q, k, scale=scale).mean
    assert masks.recall(rule, q, k, scale=scale).mean == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize(("scale", "size"), [(60.0, 100.0), (1e-9, 1.0)])
def test_another_scale_of_float16_neither_overflows_nor_vanishes(scale, size):
    rule, (q, k, v) = masks.runtime.top_blocks(1), tensors(torch.float16)
    q, k = q * size, k / size
    chosen = rule.block_map(q.float() * (scale * 32**0.5), k.float())
    out, lse = sparse_attention(q, k, v, rule, scale=scale, enable_gqa=True, return_lse=True)
    exact = sparse_attention(q, k, v, pairs(chosen), scale=scale, enable_gqa=True)
    assert (out - exact).abs().max() < 2e-3 and lse.isfinite().all()
    kept = masks.recall(pairs(chosen), q, k, scale=scale).mean
    assert masks.recall(rule, q, k, scale=scale).mean == pytest.approx(kept, abs=1e-6)


@pytest.mark.parametrize("scale", ["a", None, torch.ones(3)])
def test_a_scale_of_recall_that_is_no_number(scale):
    q, k, _ = tensors()
    if scale is None:
        assert masks.recall(masks.causal(), q, k, scale=torch.tensor(0.3)) is not None
        return
    for mask in (masks.causal(), masks.runtime.top_blocks(1)):
        with pytest.raises(InputError, match="scale must be a number, got"):
            masks.recall(mask, q, k, scale=scale)


@pytest.mark.parametrize(
    "rule",
    [
        masks.runtime.top_blocks(99, causal=True),
        masks.runtime.vertical_slash(999, 0),
        masks.runtime.xattention(mass=1),
        masks.runtime.flex_prefill(gamma=1, tau=0, least=0),
        masks.runtime.flex_prefill(gamma=1, tau=1, least=0),
        masks.runtime.flex_prefill(),  # no longer than what it keeps at least
        masks.runtime.sparge(mass=1, similarity=-1, causal=True),
        masks.runtime.sparge(mass=0.01, similarity=1, causal=True),
        masks.runtime.flash_prefill(0, sinks=0, window=0, last=0),
        masks.runtime.low_rank(mass=1),
        masks.runtime.low_rank(k=3),
        masks.runtime.per_head([masks.runtime.top_blocks(99), masks.causal()] * 2) & masks.causal(),
    ],
    ids=repr,
)
def test_a_rule_that_keeps_everything_is_causal_attention(rule):
    q, k, v = tensors()
    out = sparse_attention(q, k, v, rule, enable_gqa=True)
    assert torch.equal(out, sparse_attention(q, k, v, masks.causal(), enable_gqa=True))
    assert masks.recall(rule, q, k, within=masks.causal()).mean == pytest.approx(1)


def test_strided_inputs_of_three_dimensions_and_one_map_for_all():
    one = masks.runtime.rule(lambda q, k: torch.eye(3, dtype=torch.bool)[None, None])
    q, k, v = (x.transpose(0, 1) for x in torch.randn(3, 150, 4, 32))
    out = sparse_attention(q, k, v, one)
    assert (out - dense(q, k, v, pairs(torch.eye(3, dtype=torch.bool)))).abs().max() < 1e-5


@pytest.mark.parametrize(
    "rule",
    [
        masks.runtime.top_blocks(1),
        masks.runtime.vertical_slash(1, 1),
        masks.runtime.xattention(mass=0.1),
        masks.runtime.flex_prefill(0.1, 0, 0),
        masks.runtime.flex_prefill(0.1, 1, 0),
        masks.runtime.sparge(0.1, -1, causal=True),
        masks.runtime.flash_prefill(1, 0, 0, 0),
        masks.runtime.low_rank(0.1),
    ],
    ids=repr,
)
def test_nan_is_not_hidden(rule):
    q, k, v = tensors()
    q[:, :, 100] = float("nan")
    out = sparse_attention(q, k, v, rule, enable_gqa=True)
    assert out[:, :, 100].isnan().all() and not out[:, :, :64].isnan().any()


@pytest.mark.parametrize("place", ["k of the last", "k of an earlier", "q of the last"])
def test_what_is_always_chosen_is_kept_beside_nan_and_infinity(place):
    """The sinks and the window of `vertical_slash`: rows without NaN have what they had, rows of NaN show it."""
    q, k, v = tensors()
    rule = masks.runtime.vertical_slash(6, 6, last=8, sinks=2, window=4, block=(16, 32))
    if place == "q of the last":
        q[:, :, -1] = float("inf")
    else:
        k[:, :, -3 if place == "k of the last" else 20] = float("nan")
    found = rule.block_map(q, k)
    rows, columns = torch.arange(0, 150, 16), torch.arange(0, 150, 32)
    diagonal = (columns <= rows[:, None] + 15) & (columns + 31 >= rows[:, None])
    assert found[..., diagonal].all() and found[..., 0].all()
    out = sparse_attention(q, k, v, rule, enable_gqa=True)
    assert out[:, :, -1].isnan().all() and not (out == 0).all(-1).any()


@pytest.mark.parametrize(
    "rule",
    [
        masks.runtime.top_blocks(1, block=32),
        masks.runtime.top_blocks(2, block=32, pool="bounds"),
        masks.runtime.xattention(4, 0.5, block=32),
        masks.runtime.low_rank(0.4, block=32),
        masks.runtime.rule(lambda q, k: (q[:, :, ::50] @ k[:, :, ::50].repeat_interleave(2, 1).mT) > 0.3, block=64),
    ],
    ids=repr,
)
def test_autocast_changes_no_block(rule):
    for seed in range(3):
        q, k, _ = tensors(seed=seed)
        expected, recalled = rule.block_map(q, k), masks.recall(masks.causal(), q, k).mean
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(rule.block_map(q, k), expected)
            assert torch.equal(rule.maps_of_rows(q, k)(0, 1), expected[:, :, :1])
            assert masks.recall(masks.causal(), q, k).mean == recalled


def test_recall():
    q, k, _ = tensors()
    rule = masks.runtime.rule(peaks)
    found = masks.recall(rule, q, k)
    assert found.mean == masks.recall(pairs(peaks(q, k)), q, k).mean and 0.2 < found.mean < 0.8


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda q, k: None, "gave NoneType; a rule's function gives a bool tensor on cpu"),
        (lambda q, k: peaks(q, k).float(), "gave torch.float32 on cpu"),
        (lambda q, k: peaks(q, k)[..., :2], r"shape \(2, 4, 3, 2\); .* is \(B or 1, H or 1, 3, 3\)"),
        (lambda q, k: peaks(q, k)[:, :3], r"shape \(2, 3, 3, 3\)"),
        (lambda q, k: peaks(q, k)[0], r"shape \(4, 3, 3\)"),
        (lambda q, k: peaks(q, k).to_sparse(), r"gave a tensor of layout torch.sparse_coo; .* gives a dense one"),
    ],
)
def test_what_a_function_gives_is_checked(function, words):
    with pytest.raises(MaskError, match=words):
        sparse_attention(*tensors(), masks.runtime.rule(function), enable_gqa=True)


def test_what_is_no_rule():
    rule = masks.runtime.rule(peaks)
    for given in (3, rule, masks.causal()):
        with pytest.raises(MaskError, match="made of a function"):
            masks.runtime.rule(given)
    others = {
        "Rule: two rules": rule,
        "Tensor: masks.from_tensor": torch.ones(8, 8).bool(),
        r"causal\(\)": masks.causal,
    }
    for words, other in others.items():
        with pytest.raises(MaskError, match=f"the other side is .*{words}"):
            rule & other
    with pytest.raises(InputError, match="must have one batch"):
        rule.block_map(torch.ones(1, 2, 8, 4), torch.ones(1, 2, 8, 8))


def test_a_block_may_be_a_list():
    rule, same = (masks.runtime.top_blocks(1, block=block) for block in ([16, 32], (16, 32)))
    q, k, _ = tensors()
    assert rule.block == (16, 32) and torch.equal(rule.block_map(q, k), same.block_map(q, k))


@pytest.mark.parametrize(
    "joined, told",
    [
        (lambda rule, mask: rule and mask, "no truth value; join a rule to masks by &"),
        (lambda rule, mask: mask if not rule else rule, "no truth value"),
        (lambda rule, mask: bool(rule & mask), "no truth value"),
        (lambda rule, mask: rule | mask, "no union with top_blocks.*by & alone"),
        (lambda rule, mask: mask | rule, "no union"),
        (lambda rule, mask: torch.ones(3, 3).bool() | rule, "no union"),
        (lambda rule, mask: torch.ones(3, 3).bool().numpy() | rule, "no union"),
        (lambda rule, mask: torch.ones(3, 3).bool().numpy() & rule, "a rule & a Mask is a rule.*ndarray"),
        (lambda rule, mask: ~rule, "no complement of top_blocks"),
    ],
)
def test_operators_that_rules_lack(joined, told):
    with pytest.raises(MaskError, match=told):
        joined(masks.runtime.top_blocks(1), masks.causal())


def test_where_static_masks_are_asked_for(tmp_path):
    rule, model, x = masks.runtime.rule(peaks), torch.nn.TransformerEncoderLayer(32, 4, 64).eval(), torch.ones(9, 1, 32)
    for taken in (
        lambda: stof_tvm.tune(model, "llvm", (x,), {"self_attn": rule}, work_dir=tmp_path),
        lambda: set_mask(model, rule),
        lambda: masks_of_positions(rule, {}, 1, 4, 150),
        lambda: given_mask(rule, (1, 4, 150, 150)),
    ):
        with pytest.raises(MaskError, match=r"rule\(peaks\) is a rule, which finds its blocks from q and k"):
            taken()


def test_a_function_that_writes_into_the_queries_is_an_error():
    q = torch.randn(1, 2, 64, 16)

    def careless(q, k):
        return q.mul_(2)[:, :1, :1, :1] > k[:, :1, :1, :1] - torch.inf

    with pytest.raises(MaskError, match=r"rule\(careless\) writes into q or k"):
        masks.runtime.rule(careless, block=64).block_map(q, q.clone())
