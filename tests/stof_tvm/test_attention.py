"""`sparse_attention` against F.scaled_dot_product_attention."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import attention, masks
from stof_tvm.errors import InputError, MaskError, StofError, TuningLogError, UnsupportedError
from stof_tvm.tuning.log import TuningLog
from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels import compile_kernel
from tir_kernels.attention.select import choose
from tir_kernels.target import parse_target
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest
from tir_kernels.tuning.template_space import trace_for
from tir_kernels.tuning.workload import attention_workload


@pytest.fixture(scope="module", autouse=True)
def quick_kernels():
    """Kernels without LLVM's optimizer, which changes no semantics; tests/tir_kernels/attention has them optimized."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_target", lambda device: QUICK_LLVM)
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


@pytest.mark.parametrize("scale", [0.5, 0.0, -0.3])
def test_scale(scale):
    assert_like_torch(*qkv(), masks.causal(), scale=scale)


@pytest.mark.parametrize("shape", [(2, 2, 40, 40), (1, 2, 40, 40), (2, 1, 1, 40), (40, 40), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
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

    call = attention._Launch.__call__

    def spy(launch, inputs, earlier):
        seen["pointers"] = [x.data_ptr() for x in inputs]
        seen["layouts"] = tuple(launch.problem.layouts)
        return call(launch, inputs, earlier)

    monkeypatch.setattr(attention._Launch, "__call__", spy)
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
    monkeypatch.setattr(attention, "_plan", lambda problem, *_: problems.append(problem) or [])
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
    names, compile_ = [], attention.compile_attention
    record = lambda name, problem, config, target: names.append((name, config))
    monkeypatch.setattr(attention, "compile_attention", lambda *a: record(*a) or compile_(*a))
    return names


def test_a_tuning_log_goes_before_the_model(logged, launched, tmp_path):
    tensors, mask, best = logged
    out = stof_tvm.sparse_attention(*tensors, mask, tuning_logs=tmp_path / "tuning_logs")
    torch.testing.assert_close(out, stof_tvm.sparse_attention(*tensors, mask, tuning_logs=False))
    assert launched[0] == best != launched[1]


def test_the_log_of_the_working_directory_is_the_default(logged, launched, tmp_path, monkeypatch):
    tensors, mask, best = logged
    monkeypatch.chdir(tmp_path)
    attention._tuned.cache_clear()
    attention._plan.cache_clear()
    stof_tvm.sparse_attention(*tensors, mask)
    stof_tvm.sparse_attention(*tensors, mask, kernel="block-wise")
    attention._tuned.cache_clear()
    attention._plan.cache_clear()
    assert launched[0] == best and launched[1][0] == "block-wise"


def test_a_missing_log_is_an_error(tmp_path):
    with pytest.raises(TuningLogError, match="is no folder"):
        stof_tvm.sparse_attention(*qkv(), masks.causal(), tuning_logs=tmp_path / "missing")


def test_second_call_compiles_nothing(monkeypatch):
    q, k, v = qkv(dim=24)
    stof_tvm.sparse_attention(q, k, v, masks.causal())
    monkeypatch.setattr("tir_kernels.compile_kernel._compile", lambda *_: pytest.fail("compiled again"))
    assert_like_torch(q, k, v, masks.causal())
    assert_like_torch(*qkv(dim=24, seed=5), masks.causal())


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """A function that calls the default kernel with nothing in memory: how often it compiled, with a cache on disk."""
    monkeypatch.setenv("STOF_CACHE_DIR", str(tmp_path))
    calls, compile_ = [], compile_kernel._compile
    monkeypatch.setattr(compile_kernel, "_compile", lambda *a: calls.append(a) or compile_(*a))

    def count() -> int:
        attention._plan.cache_clear()
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
    monkeypatch.setattr(attention, "_target", lambda device: parse_target("llvm"))
    assert compiled() == 1
    code = (
        "import torch, stof_tvm\n"
        "from stof_tvm import masks\n"
        "import tir_kernels.compile_kernel as c\n"
        "c._compile = None\n"
        "q = torch.ones(1, 1, 16, 8)\n"
        "assert torch.allclose(stof_tvm.sparse_attention(q, q, q, masks.causal()), q)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


BAD_CALLS = {
    "float mask": (lambda q, k, v: ((q, k, v, torch.zeros(40, 40)), {}), MaskError, "must be bool"),
    "mask shape": (lambda q, k, v: ((q, k, v, torch.ones(39, 40, dtype=torch.bool)), {}), MaskError, r"\(39, 40\)"),
    "mask type": (lambda q, k, v: ((q, k, v, "causal"), {}), MaskError, "got str"),
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
