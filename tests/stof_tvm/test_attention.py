"""`sparse_attention` against F.scaled_dot_product_attention."""

import gc
import json
import os
import subprocess
import sys
import typing
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, create_mask

import stof_tvm
from stof_tvm import attention, masks
from stof_tvm.errors import InputError, MaskError, StofError, TuningLogError, UnsupportedError
from stof_tvm.launches import planned
from stof_tvm.masks.arguments import FixedArray
from stof_tvm.masks.flex import taken_directly
from stof_tvm.tuning.logs.log import TuningLog
from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels.attention import compiled as compile_kernel
from tir_kernels.attention.registry import TEMPLATES
from tir_kernels.attention.select import choose
from tir_kernels.target import parse_target
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest
from tir_kernels.tuning.template_space import trace_for
from tir_kernels.tuning.workload import attention_workload


@pytest.fixture(scope="module", autouse=True)
def quick_kernels():
    """Kernels without LLVM's optimizer, which changes no semantics; tests/tir_kernels/attention has them optimized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planned, "target_of", lambda device: QUICK_LLVM)
        yield


def qkv(batch=2, heads=2, q_len=40, kv_len=None, dim=16, kv_heads=None, v_dim=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    kv_len, kv_heads, v_dim = kv_len or q_len, kv_heads or heads, v_dim or dim
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, v_dim)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def assert_like_torch(q, k, v, mask=None, scale=None, bias=None, enable_gqa=False, **kwargs):
    out = stof_tvm.sparse_attention(q, k, v, mask, scale=scale, bias=bias, enable_gqa=enable_gqa, **kwargs)
    dense = mask.dense(q.shape[-2], k.shape[-2]) if isinstance(mask, masks.Mask) else mask
    additive = dense
    if bias is not None:
        additive = bias.float() if dense is None else bias.float().masked_fill(~dense, -torch.inf)
    arguments = [x.float() for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*arguments, attn_mask=additive, scale=scale, enable_gqa=enable_gqa)
    expected = expected.nan_to_num(0.0)  # a row with nothing kept is 0 here, whatever torch's back-end makes of it
    assert out.shape == expected.shape and out.dtype == q.dtype
    tolerance = 1e-5 if q.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.float(), expected, rtol=tolerance, atol=tolerance)
    return out


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
@pytest.mark.parametrize("q_len, kv_len, with_bias", [(40, 40, False), (37, 53, True), (1, 3000, False)])
def test_log_sum_exp(kernel, q_len, kv_len, with_bias):
    q, k, v = qkv(q_len=q_len, kv_len=kv_len, heads=4, kv_heads=2, dim=24)
    keep = torch.rand(q_len, kv_len, generator=torch.Generator().manual_seed(1)) < 0.4
    keep[q_len // 3] = q_len == 1  # an empty row
    bias = torch.randn(4, q_len, kv_len, generator=torch.Generator().manual_seed(2)) if with_bias else None
    out, lse = stof_tvm.sparse_attention(q, k, v, keep, bias=bias, enable_gqa=True, kernel=kernel, return_lse=True)
    scores = q @ k.repeat_interleave(2, dim=1).transpose(2, 3) * 24**-0.5 + (0 if bias is None else bias)
    expected = torch.logsumexp(scores.masked_fill(~keep, -torch.inf), dim=3)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        out, stof_tvm.sparse_attention(q, k, v, keep, bias=bias, enable_gqa=True, kernel=kernel), rtol=0, atol=0
    )


def test_log_sum_exp_has_the_rank_of_the_inputs():
    q, k, v = (x[0, 0] for x in qkv())
    out, lse = stof_tvm.sparse_attention(q, k, v, return_lse=True)
    assert out.shape == (40, 16) and lse.shape == (40,) and lse.dtype == torch.float32
    out, lse = stof_tvm.sparse_attention(q[:, :], k[:0], v[:0], return_lse=True)
    assert not out.any() and torch.isneginf(lse).all()


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise", None])
def test_mask_object(kernel):
    assert_like_torch(*qkv(), masks.sliding_window(5) & masks.causal(), kernel=kernel)


@pytest.mark.parametrize(
    "shape", [(40, 40), (2, 1, 40, 40), (1, 2, 40, 40), (2, 2, 40, 40), (2, 1, 1, 40), (1, 1, 40, 1)]
)
def test_bool_tensor_of_every_broadcast_shape(shape):
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    assert_like_torch(*qkv(), keep)


def test_mask_tensor_changed_in_place_is_read_again():
    q, k, v = qkv()
    keep = torch.ones(40, 40, dtype=torch.bool).tril()
    assert_like_torch(q, k, v, keep)
    keep[:, :7] = False
    assert_like_torch(q, k, v, keep)


def test_no_mask_is_full_attention():
    assert_like_torch(*qkv(), None)


def test_fully_masked_rows_are_zero():
    keep = torch.ones(40, 40, dtype=torch.bool)
    keep[[0, 17, 39]] = False
    out = assert_like_torch(*qkv(), keep)
    assert (out[:, :, [0, 17, 39]] == 0).all()


def test_grouped_query_attention():
    q, k, v = qkv(heads=4, kv_heads=2)
    assert_like_torch(q, k, v, masks.causal(), enable_gqa=True)
    with pytest.raises(InputError, match="enable_gqa"):
        stof_tvm.sparse_attention(q, k, v, masks.causal())


@pytest.mark.parametrize("scale", ["a", (1,), torch.ones(2)])
def test_a_scale_that_is_no_number(scale):
    with pytest.raises(InputError, match="scale must be a number, got"):
        stof_tvm.sparse_attention(*qkv(), scale=scale)


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.3])
def test_scale(scale):
    assert_like_torch(*qkv(), masks.causal(), scale=scale)


@pytest.mark.parametrize(
    "shape, dtype",
    [
        *((shape, torch.float32) for shape in [(2, 2, 40, 40), (1, 2, 40, 40), (2, 1, 1, 40), (40, 40), (1,)]),
        *((shape, torch.float16) for shape in [(2, 2, 40, 40), (2, 1, 1, 40)]),
    ],
)
def test_bias_of_every_broadcast_shape(shape, dtype):
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert_like_torch(*qkv(dtype=dtype), masks.sliding_window(9), bias=bias)


def test_expanded_bias_is_not_materialised_and_minus_infinity_masks():
    bias = torch.zeros(2, 1, 1, 40)
    bias[1, ..., 30:] = -torch.inf
    assert_like_torch(*qkv(), masks.causal(), bias=bias.expand(2, 2, 40, 40))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    assert_like_torch(*qkv(dtype=dtype), masks.causal())


def test_lengths_that_differ_and_value_heads_of_another_size():
    assert_like_torch(*qkv(q_len=33, kv_len=70, dim=20, v_dim=12), masks.causal(align="bottom-right"))


@pytest.mark.parametrize("rank", [2, 3])
def test_missing_batch_or_heads(rank):
    q, k, v = (x.reshape(x.shape[4 - rank :]) for x in qkv(batch=1, heads=1 if rank == 2 else 3))
    assert_like_torch(q, k, v, masks.causal())


@pytest.fixture
def seen(monkeypatch):
    """What the kernel of the latest call was given: pointers of q, k and v, and the layouts."""
    seen = {}

    call = planned.Launch.__call__

    def spy(launch, inputs, *rest):
        seen["pointers"] = [x.data_ptr() for x in inputs]
        seen["layouts"] = tuple(launch.problem.layouts)
        return call(launch, inputs, *rest)

    monkeypatch.setattr(planned.Launch, "__call__", spy)
    return seen


def test_transposed_views_are_read_in_place(seen):
    """(B, S, H, D) as a projection leaves it: the kernel gets the very storage, and so does the caller."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv())
    out = assert_like_torch(q, k, v, masks.causal())
    assert seen["pointers"] == [x.data_ptr() for x in (q, k, v)]
    assert seen["layouts"] == ("bshd",) * 4 and out.transpose(1, 2).is_contiguous()


PACKED = {
    "(B, S, 3, H, D)": lambda: [x.transpose(1, 2) for x in torch.randn(2, 40, 3, 2, 16).unbind(2)],
    "(B, S, H, 3, D)": lambda: [x.transpose(1, 2) for x in torch.randn(2, 40, 2, 3, 5).unbind(3)],
    "(S, B, 3, H, D)": lambda: [x.permute(1, 2, 0, 3) for x in torch.randn(40, 2, 3, 2, 16).unbind(2)],
    "(B, H, S, 3 D)": lambda: torch.randn(2, 2, 40, 48).split(16, dim=3),
    "a cache that is longer": lambda: torch.randn(3, 2, 2, 100, 16)[:, :, :, 7:47].unbind(0),
    "reversed by flip": lambda: [x.flip(2)[:, :, ::2] for x in torch.randn(3, 2, 2, 80, 16).unbind(0)],
}


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_projections_are_read_in_place(name, kernel, seen):
    torch.manual_seed(0)
    q, k, v = PACKED[name]()
    out = assert_like_torch(q, k, v, masks.causal(), kernel=kernel)
    assert seen["pointers"] == [x.data_ptr() for x in (q, k, v)]
    inner_heads = name.startswith(("(B, S", "(S, B"))
    assert (out.transpose(1, 2) if inner_heads else out).is_contiguous()


def test_expanded_heads_are_read_in_place(seen):
    q, k, v = qkv()
    assert_like_torch(q, k[:, :1].expand(2, 2, 40, 16), v[:1].expand(2, 2, 40, 16), masks.causal())
    assert seen["layouts"][1].head == seen["layouts"][2].batch == 0


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
@pytest.mark.parametrize(
    "which, repeated", [("q", "all"), ("k", "length"), ("v", "head"), ("kv", "batch"), ("kv", "length"), ("kv", "all")]
)
def test_repeated_dimensions_are_read_in_place(kernel, which, repeated, seen):
    """Strides of 0, from `expand`, in any dimension but the last."""
    dims = {"batch": [0], "head": [1], "length": [2], "all": [0, 1, 2]}[repeated]
    tensors = dict(zip("qkv", qkv(heads=2, dim=12)))
    for name in which:
        x = tensors[name]
        for dim in dims:
            x = x.narrow(dim, 0, 1)
        tensors[name] = x.expand(2, 2, 40, 12)
    assert_like_torch(*tensors.values(), masks.causal(), kernel=kernel)
    assert all(seen["layouts"]["qkv".index(name)][2 + dim] == 0 for name in which for dim in dims)


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
def test_one_token(kernel):
    assert_like_torch(*qkv(q_len=1), masks.causal(), kernel=kernel)
    assert_like_torch(*(x.transpose(1, 2) for x in torch.randn(2, 1, 3, 2, 16).unbind(2)), kernel=kernel)
    bias = torch.randn(2, 2, 1, 1)
    assert_like_torch(*qkv(q_len=1), masks.causal(), bias=bias, kernel=kernel)


def test_every_key_is_the_same_and_its_bias_is_not():
    """The row-wise kernel then needs its list of columns for the bias alone."""
    q, k, v = qkv()
    k, v = (x[:, :, :1].expand(2, 2, 40, 16) for x in (k, v))
    for width in (1, 40):
        bias = torch.randn(2, 2, 40, width)
        _, lse = stof_tvm.sparse_attention(q, k, v, bias=bias, kernel="row-wise", return_lse=True)
        expected = (q @ k.mT / 4 + bias).logsumexp(-1)
        torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


# -- sinks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sink(kernel, dtype):
    """As transformers computes gpt-oss: a column of sinks beside the scores, dropped after the softmax."""
    q, k, v = qkv(heads=4, kv_heads=2, kv_len=53)
    sink = torch.tensor([0.5, 4.0, -torch.inf, 300.0]).to(dtype)
    keep = torch.rand(40, 53, generator=torch.Generator().manual_seed(1)) < 0.4
    keep[7] = False
    out, lse = stof_tvm.sparse_attention(q, k, v, keep, enable_gqa=True, kernel=kernel, return_lse=True, sink=sink)
    scores = (q @ k.repeat_interleave(2, dim=1).mT / 4).masked_fill(~keep, -torch.inf)
    both = torch.cat([scores, sink.float()[:, None, None].expand(2, 4, 40, 1)], dim=-1)
    weights = both.softmax(dim=-1).nan_to_num(0.0)[..., :-1]
    torch.testing.assert_close(out, weights @ v.repeat_interleave(2, dim=1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, both.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_sink_with_nothing_else():
    q, k, v = qkv()
    sink = torch.tensor([0.5, torch.nan])
    out, lse = stof_tvm.sparse_attention(q, k[:, :, :0], v[:, :, :0], sink=sink, return_lse=True)
    assert not out[:, 0].any() and (lse[:, 0] == 0.5).all()
    assert out[:, 1].isnan().all() and lse[:, 1].isnan().all()
    plain = stof_tvm.sparse_attention(*(x[0, 0] for x in (q, k, v)), sink=torch.tensor([-torch.inf]))
    assert torch.equal(plain, stof_tvm.sparse_attention(*(x[0, 0] for x in (q, k, v))))


# -- softcap --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["block-wise", "row-wise"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcap(kernel, dtype):
    """Before the bias and the mask, as in Gemma 2."""
    q, k, v = (x.to(dtype) for x in qkv(heads=4, kv_heads=2, kv_len=53))
    generator = torch.Generator().manual_seed(1)
    keep, bias = torch.rand(40, 53, generator=generator) < 0.4, torch.randn(4, 40, 53, generator=generator)
    keep[7] = False
    options = dict(bias=bias, enable_gqa=True, kernel=kernel, return_lse=True, scale=1.0)
    out, lse = stof_tvm.sparse_attention(q, k, v, keep, softcap=2, **options)
    k, v = (x.float().repeat_interleave(2, dim=1) for x in (k, v))
    scores = (2 * torch.tanh(q.float() @ k.mT / 2) + bias).masked_fill(~keep, -torch.inf)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.float(), scores.softmax(-1).nan_to_num(0.0) @ v, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-5, atol=1e-5)


# -- FlexAttention's masks, taken directly -----------------------------------------------------------------------------


def mask_mods():
    lengths, slopes = torch.tensor([40, 11]), torch.tensor([3, 9])
    return {
        "neither": lambda b, h, q, k: q >= k,
        "batch": lambda b, h, q, k: k < lengths[b],
        "head": lambda b, h, q, k: q - k < slopes[h],
        "both": lambda b, h, q, k: (k < lengths[b]) & (q - k < slopes[h]),
    }


@pytest.mark.parametrize("reads", ["neither", "batch", "head", "both"])
def test_mask_mod(reads):
    q, k, v = qkv()
    mod = mask_mods()[reads]
    out = stof_tvm.sparse_attention(q, k, v, mod)
    keep = create_mask(mod, 2, 2, 40, 40, device="cpu")
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, keep), rtol=1e-5, atol=1e-5)
    sizes = {"neither": (None, None), "batch": (2, None), "head": (None, 2), "both": (2, 2)}[reads]
    direct = taken_directly(mod, 2, 2)
    assert (direct.batch, direct.heads) == sizes, "nothing is evaluated for each head that is the same for all"


def test_block_mask(monkeypatch):
    q, k, v = qkv()
    ids = torch.arange(40) // 9
    block_mask = create_block_mask(lambda b, h, q, k: ids[q] == ids[k], None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    made = []
    monkeypatch.setattr(masks, "from_block_mask", lambda x, make=masks.from_block_mask: made.append(x) or make(x))
    for _ in range(2):
        out = stof_tvm.sparse_attention(q, k, v, block_mask)
        keep = create_mask(block_mask.mask_mod, None, None, 40, 40, device="cpu")[0, 0]
        torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, keep), rtol=1e-5, atol=1e-5)
    assert len(made) == 1
    block_mask.kv_num_blocks[..., 1:] = 0  # only the first row of blocks is left
    keep[16:] = False
    out = stof_tvm.sparse_attention(q, k, v, block_mask)
    expected = F.scaled_dot_product_attention(q, k, v, keep).nan_to_num(0.0)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(MaskError, match="BlockMask for"):
        stof_tvm.sparse_attention(q[:, :, :20], k, v, block_mask)


def test_a_mask_mod_is_never_stale():
    q, k, v = qkv()
    ids, width = torch.arange(40) // 9, 40

    def mod(b, h, q_idx, kv_idx):
        return (ids[q_idx] == ids[kv_idx]) & (q_idx - kv_idx < width)

    mask = masks.from_mask_mod(mod) & masks.causal()
    for change in range(4):
        if change == 1:
            ids[:20] = 0  # in place
        if change == 2:
            ids.numpy()[30:] = 0  # in place, by a way that PyTorch does not count
        if change == 3:
            ids, width = torch.zeros(40, dtype=torch.int64), 5  # assigned anew
        keep = create_mask(mod, None, None, 40, 40, device="cpu")[0, 0]
        for given, kept in ((mod, keep), (mask, keep.tril())):
            out = stof_tvm.sparse_attention(q, k, v, given)
            torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, kept), rtol=1e-5, atol=1e-5)


def test_no_dense_mask_stays_in_memory():
    """What masks are known by holds none of their arrays, whether the caller keeps the tensor or not."""
    q, k, v = qkv(q_len=64)
    made, init = [], FixedArray.__init__

    def note(self, array):
        init(self, array)
        made.append(weakref.ref(self))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedArray, "__init__", note)
        kept = [torch.rand(64, 64, generator=torch.Generator().manual_seed(n)) < 0.5 for n in range(5)]
        for _ in range(2):
            for keep in kept:
                assert_like_torch(q, k, v, keep)
            assert_like_torch(q, k, v, masks.from_tensor(kept[0]))
            assert_like_torch(q, k, v, masks.per_head([masks.from_tensor(x) for x in kept[:2]]))
    gc.collect()
    assert made and not any(reference() is not None for reference in made)


def test_plans_are_bounded(monkeypatch):
    plans = planned.plans
    plans.clear()
    q, k, v = qkv()
    stof_tvm.sparse_attention(q, k, v, masks.sliding_window(1))
    size = plans.bytes
    monkeypatch.setattr(plans, "most_bytes", 4 * size)
    for window in range(2, 12):
        stof_tvm.sparse_attention(q, k, v, masks.sliding_window(window))
    assert size > 0 and plans.bytes == sum(map(plans.size, plans.entries.values())) <= 4 * size
    assert 0 < len(plans.entries) <= 4


def test_elements_that_do_not_lie_side_by_side_are_copied(seen):
    q, k, v = qkv()
    assert_like_torch(q, k.mT.contiguous().mT, v[..., :1].expand(2, 2, 40, 16), masks.causal())
    assert seen["layouts"] == ("bhsd",) * 4


def test_other_strides_and_misaligned_storage():
    q, k, v = qkv()
    flat = torch.randn(q.numel() + 4)
    for start in range(1, 5):
        assert_like_torch(
            flat[start : start + q.numel()].view(q.shape), k, v, masks.causal(), bias=flat[start : start + 40]
        )
    assert_like_torch(q, k[:, :, :, torch.arange(16)], v.flip(2)[:, :, ::1], masks.causal())
    packed = torch.randn(2, 40, 3, 2, 16)
    assert_like_torch(*(packed[:, :, i].transpose(1, 2) for i in range(3)), masks.causal())


def test_empty_batch_and_empty_lengths():
    q, k, v = qkv()
    assert stof_tvm.sparse_attention(q[:0], k[:0], v[:0], masks.causal()).shape == (0, 2, 40, 16)
    assert stof_tvm.sparse_attention(q[:, :, :0], k, v, masks.causal()).shape == (2, 2, 0, 16)
    assert (stof_tvm.sparse_attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()


def test_per_head_and_per_batch_masks():
    assert_like_torch(*qkv(), masks.per_head([masks.causal(), masks.sliding_window(3)]))
    assert_like_torch(*qkv(), masks.padding([40, 11]) & masks.causal())


@pytest.fixture
def logged(tmp_path, monkeypatch):
    """A log that says of one attention what the model would not choose: (q, k, v), mask, the configuration."""
    q, k, v = qkv(dim=24)
    mask, target, problems = masks.sliding_window(5), QUICK_LLVM, []
    monkeypatch.setattr(attention, "planned", lambda problem, *_: problems.append(problem) or [])
    with pytest.raises(IndexError):  # there is no plan, so there are no results
        stof_tvm.sparse_attention(q, k, v, mask)
    monkeypatch.undo()
    (problem,) = problems
    workload = attention_workload(problem, mask_digest(problem, mask))
    space = attention_spaces(problem, mask, target)[-1]
    config = space.configs[-1]
    usual = choose(problem, mask, target)
    assert (space.template, config) != (usual.template, usual.config)
    TuningLog(tmp_path / "tuning_logs", target).add(workload, trace_for(workload, space, config), 1.0, "a processor")
    return (q, k, v), mask, (space.template.NAME, config)


@pytest.fixture
def launched(monkeypatch):
    """(name of the template, configuration) of every launch that is prepared from now on."""
    names, compile_ = [], planned.compile_attention
    record = lambda name, problem, config, target: names.append((name, config))
    monkeypatch.setattr(planned, "compile_attention", lambda *a: record(*a) or compile_(*a))
    return names


def test_a_tuning_log_goes_before_the_model(logged, launched, tmp_path):
    tensors, mask, best = logged
    out = stof_tvm.sparse_attention(*tensors, mask, tuning_logs=tmp_path / "tuning_logs")
    torch.testing.assert_close(out, stof_tvm.sparse_attention(*tensors, mask, tuning_logs=False))
    assert launched[0] == best != launched[1]


def test_the_log_of_the_working_directory_is_the_default(logged, launched, tmp_path, monkeypatch):
    tensors, mask, best = logged
    monkeypatch.chdir(tmp_path)
    planned.tuned_at.cache_clear()
    planned.plans.clear()
    stof_tvm.sparse_attention(*tensors, mask)
    stof_tvm.sparse_attention(*tensors, mask, kernel="block-wise")
    planned.tuned_at.cache_clear()
    planned.plans.clear()
    assert launched[0] == best and launched[1][0] == "block-wise"


def test_a_missing_log_is_an_error(tmp_path):
    with pytest.raises(TuningLogError, match="is no folder"):
        stof_tvm.sparse_attention(*qkv(), masks.causal(), tuning_logs=tmp_path / "missing")


def test_second_call_compiles_nothing(monkeypatch):
    q, k, v = qkv(dim=24)
    stof_tvm.sparse_attention(q, k, v, masks.causal())
    monkeypatch.setattr("tir_kernels.attention.compiled._compile", lambda *_: pytest.fail("compiled again"))
    assert_like_torch(q, k, v, masks.causal())
    assert_like_torch(*qkv(dim=24, seed=5), masks.causal())


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A function that calls the default kernel with nothing in memory: how often it compiled, with a cache on disk."""
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path))
    calls, compile_ = [], compile_kernel._compile
    monkeypatch.setattr(compile_kernel, "_compile", lambda *a: calls.append(a) or compile_(*a))

    def count() -> int:
        planned.plans.clear()
        compile_kernel.compile_attention.cache_clear()
        calls.clear()
        q = torch.ones(1, 1, 16, 8)
        assert torch.allclose(stof_tvm.sparse_attention(q, q, q, masks.causal()), q)
        return len(calls)

    return count


def test_a_kernel_on_disk_is_compiled_again_only_where_it_is_damaged(compiled, tmp_path):
    assert [compiled(), compiled()] == [1, 0]
    (library,) = tmp_path.glob("*.so")
    # Another file: the pages of the one that is loaded are in use.
    damaged = library.with_suffix(".damaged")
    damaged.write_bytes(library.read_bytes()[:1000])
    os.replace(damaged, library)
    assert [compiled(), compiled()] == [1, 0]
    (checksum,) = tmp_path.glob("*.json")
    checksum.write_text(json.dumps([]))
    assert [compiled(), compiled()] == [1, 0]


@pytest.mark.slow  # starts Python
def test_a_fresh_process_finds_the_kernel_on_disk(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "target_of", lambda device: parse_target("llvm"))
    assert compiled() == 1
    code = (
        "import torch, stof_tvm\n"
        "from stof_tvm import masks\n"
        "import tir_kernels.attention.compiled as c\n"
        "c._compile = None\n"
        "q = torch.ones(1, 1, 16, 8)\n"
        "assert torch.allclose(stof_tvm.sparse_attention(q, q, q, masks.causal()), q)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


BAD_CALLS = {
    "float mask": (lambda q, k, v: ((q, k, v, torch.zeros(40, 40)), {}), MaskError, "must be bool"),
    "mask shape": (lambda q, k, v: ((q, k, v, torch.ones(39, 40, dtype=torch.bool)), {}), MaskError, r"\(39, 40\)"),
    "mask type": (lambda q, k, v: ((q, k, v, "causal"), {}), MaskError, "mask is the text .causal."),
    "softcap": (lambda q, k, v: ((q, k, v), {"softcap": 0.0}), InputError, "softcap=0.0 must be a positive"),
    "softcap type": (lambda q, k, v: ((q, k, v), {"softcap": "50 %"}), InputError, "softcap must be a number, got str"),
    "sink shape": (lambda q, k, v: ((q, k, v), {"sink": torch.zeros(3)}), InputError, r"shape \(2,\), got \(3,\)"),
    "sink dtype": (lambda q, k, v: ((q, k, v), {"sink": torch.zeros(2, dtype=torch.int64)}), InputError, "torch.int64"),
    "sink type": (lambda q, k, v: ((q, k, v), {"sink": 0.5}), InputError, "sink must be a torch.Tensor, got float"),
    "sink device": (
        lambda q, k, v: ((q, k, v), {"sink": torch.zeros(2, device="meta")}),
        InputError,
        "sink is on meta",
    ),
    "sink with gradients": (
        lambda q, k, v: ((q, k, v), {"sink": torch.zeros(2, requires_grad=True)}),
        InputError,
        "sink requires grad",
    ),
    "mask function": (lambda q, k, v: ((q, k, v, lambda b, h, q, k: q - k), {}), MaskError, "must return a boolean"),
    "mask that keeps nothing": (
        lambda q, k, v: ((q, k, v, torch.zeros(40, 40, dtype=torch.bool)), {}),
        MaskError,
        "keeps nothing",
    ),
    "mask for other heads": (
        lambda q, k, v: ((q, k, v, masks.per_head([masks.causal()] * 2 + [~masks.causal()])), {}),
        MaskError,
        "broadcast",
    ),
    "dtype": (lambda q, k, v: ((q.double(), k.double(), v.double()), {}), InputError, "float64"),
    "mixed dtypes": (lambda q, k, v: ((q, k.half(), v), {}), InputError, "k has dtype"),
    "head dim": (lambda q, k, v: ((q, k[..., :8], v), {}), InputError, "same head dimension"),
    "k and v lengths": (lambda q, k, v: ((q, k, v[:, :, :7]), {}), InputError, "same heads and length"),
    "layout": (
        lambda q, k, v: ((q.transpose(1, 2), k, v), {}),
        InputError,
        r"or transpose the one that is \(batch, length, heads, dim\)",
    ),
    "mask of padding": (
        lambda q, k, v: ((q, k, v, torch.ones(q.shape[0], 40, dtype=torch.bool)), {}),
        MaskError,
        r"of padding, \(B, Skv\), it is mask\[:, None, None\]",
    ),
    "batch": (lambda q, k, v: ((q, k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), {}), InputError, "batch"),
    "rank": (lambda q, k, v: ((q[None], k[None], v[None]), {}), InputError, "2 to 4"),
    "not a tensor": (lambda q, k, v: ((q, k, None), {}), InputError, "NoneType"),
    "bias shape": (lambda q, k, v: ((q, k, v), {"bias": torch.zeros(3, 40)}), InputError, "does not broadcast"),
    "autograd": (lambda q, k, v: ((q.requires_grad_(), k, v), {}), InputError, "no_grad"),
    "kernel name": (lambda q, k, v: ((q, k, v), {"kernel": "magic"}), UnsupportedError, "'magic'"),
    "device": (lambda q, k, v: ((q, k.to("meta"), v), {}), InputError, "meta"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_one_clear_error(case):
    make, kind, rule = BAD_CALLS[case]
    args, kwargs = make(*qkv())
    with pytest.raises(kind, match=rule) as raised:
        stof_tvm.sparse_attention(*args, **kwargs)
    assert isinstance(raised.value, StofError)


def test_head_dimension_beyond_the_largest():
    with pytest.raises(UnsupportedError, match="head_dim=264"):
        stof_tvm.sparse_attention(*qkv(dim=264), masks.causal())


def test_negative_views_and_sparse_tensors():
    """torch._neg_view is what the imaginary part of a conjugate is: memory of the other sign."""
    q, k, v = torch.randn(3, 1, 2, 16, 8)
    engine = stof_tvm.build(Attention(), "llvm", (q, k, v), verify=False, tuning_logs=False)
    expected = F.scaled_dot_product_attention(-q, k, -v)
    for call in (engine, lambda *x: stof_tvm.sparse_attention(*x)):
        assert (call(torch._neg_view(q), k, torch._neg_view(v)) - expected).abs().max() < 1e-5
        with pytest.raises(InputError, match="k must be a dense tensor, got one of layout torch.sparse_coo"):
            call(q, k.to_sparse(), v)


class Attention(torch.nn.Module):
    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)


def test_editors_complete_the_kernels_that_there_are():
    assert set(typing.get_args(attention.Kernel)) == {template.NAME for template in TEMPLATES}


@pytest.mark.parametrize("unwritten", [False, True])
def test_a_call_has_counters_of_its_own_unless_nothing_counts(unwritten):
    launch = object.__new__(planned.Launch)
    launch.shares_workspace = unwritten
    where = "cpu" if unwritten else "meta"  # what a call has of its own is not held between calls
    partials = torch.ones(3, 2, 4, device=where)
    counters = [torch.ones(shape, dtype=torch.uint32, device=where) for shape in ((3, 2), (1,))]
    launch.workspace = (partials, *counters)
    launch.counters = planned.Counters(sum(launch._counted()), torch.device("cpu"))
    mine, *zeros = launch._own_workspace(torch.device("cpu"))
    if unwritten:
        assert mine is partials and all(x is y for x, y in zip(zeros, counters))
        return
    assert mine.shape == partials.shape and mine.device.type == "cpu"
    for zero, counter in zip(zeros, counters):
        assert zero.shape == counter.shape and zero.dtype == counter.dtype and not zero.int().any()
        assert (zero.data_ptr() - zeros[0].data_ptr()) % 256 == 0
    assert len({x.data_ptr() for x in zeros}) == 2


def test_float32_has_no_effect_on_a_cpu_and_an_unknown_one_is_named():
    q, k, v = qkv()
    assert torch.equal(stof_tvm.sparse_attention(q, k, v, float32="tf32"), stof_tvm.sparse_attention(q, k, v))
    with pytest.raises(InputError, match="float32='exact' is not one of 'ieee', 'tf32'"):
        stof_tvm.sparse_attention(q, k, v, float32="exact")
