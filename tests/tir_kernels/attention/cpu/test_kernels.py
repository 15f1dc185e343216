"""CPU attention kernels against the float64 reference: masks, shapes, dtypes, layouts, biases."""

import platform

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm.target.codegen import llvm_cpu_has_features

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference
from tir_kernels.target import parse_target

TOLERANCE = 2e-5  # absolute, float32, unit normal operands
FINFO_MIN = torch.finfo(torch.float32).min


def problem_of(q_len=113, kv_len=203, head_dim=64, v_head_dim=None, dtype="float32", heads=(4, 2), **kwargs):
    v_head_dim = v_head_dim or head_dim
    return AttentionProblem(2, *heads, q_len, kv_len, head_dim, v_head_dim, dtype, head_dim**-0.5, **kwargs)


def numpy_of(tensors):
    return [x.double().numpy() for x in tensors]


def distances(q_len, kv_len):
    return np.arange(q_len)[:, None] - np.arange(kv_len)[None]


def causal(q_len, kv_len):
    return distances(q_len, kv_len) >= 0


def window(q_len, kv_len, reach=20):
    return np.abs(distances(q_len, kv_len)) <= reach


def longformer(q_len, kv_len):
    keep = window(q_len, kv_len)
    keep[:7] = True
    keep[:, :7] = True
    return keep


def random_blocks(q_len, kv_len, block=32, fill=0.3):
    grid = np.random.default_rng(1).random((-(-q_len // block), -(-kv_len // block))) < fill
    return np.kron(grid, np.ones((block, block), bool))[:q_len, :kv_len]


def dilated(q_len, kv_len, dilation=7):
    return distances(q_len, kv_len) % dilation == 0


def scattered(q_len, kv_len, density=0.2, seed=2):
    return np.random.default_rng(seed).random((q_len, kv_len)) < density


def empty_rows(q_len, kv_len):
    keep = scattered(q_len, kv_len)
    keep[::3] = False
    keep[64:100] = False
    return keep


def one_element(q_len, kv_len):
    keep = np.zeros((q_len, kv_len), bool)
    keep[q_len - 1, kv_len - 1] = True
    return keep


def per_head(q_len, kv_len):
    builders = causal, window, dilated, empty_rows
    return np.stack([build(q_len, kv_len) for build in builders])


def per_batch(q_len, kv_len):
    return np.stack([scattered(q_len, kv_len)[None], window(q_len, kv_len)[None]])


def per_batch_and_head(q_len, kv_len):
    return np.stack([per_head(q_len, kv_len), per_head(q_len, kv_len)[::-1]])


MASKS = {
    "all full": lambda q_len, kv_len: np.ones((q_len, kv_len), bool),
    "all empty": lambda q_len, kv_len: np.zeros((q_len, kv_len), bool),
    **{
        build.__name__.replace("_", " "): build
        for build in (causal, window, longformer, random_blocks, dilated, scattered, empty_rows, one_element)
    },
    **{build.__name__.replace("_", " "): build for build in (per_head, per_batch, per_batch_and_head)},
}


@pytest.mark.parametrize("mask", MASKS)
def test_masks(template, run_kernel, make_operands, mask):
    problem = problem_of()
    keep = MASKS[mask](problem.q_len, problem.kv_len)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, tensors).numpy()
    expected = attention_reference(problem, *numpy_of(tensors), keep)
    assert np.abs(got - expected).max() < TOLERANCE
    kept_nothing = ~np.broadcast_to(keep, (2, 4, 113, 203)).any(axis=3)
    assert not got[kept_nothing].any()


@pytest.mark.parametrize(
    "q_len, kv_len, head_dim, v_head_dim, heads",
    [
        (97, 97, 8, 8, (2, 2)),
        (257, 257, 20, 24, (1, 1)),
        (64, 64, 80, 80, (2, 1)),
        (1, 1, 64, 64, (6, 2)),
        (1, 300, 96, 64, (2, 2)),
        (5, 1100, 64, 64, (1, 1)),  # few rows and many keys: the row-wise kernel splits them
        (70, 130, 256, 17, (1, 1)),
        (33, 65, 5, 256, (3, 1)),
        (128, 256, 1, 1, (1, 1)),
    ],
)
def test_shapes(template, run_kernel, make_operands, q_len, kv_len, head_dim, v_head_dim, heads):
    problem = problem_of(q_len, kv_len, head_dim, v_head_dim, heads=heads)
    keep = scattered(q_len, kv_len, 0.4) | window(q_len, kv_len, 40)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, tensors).numpy()
    assert np.abs(got - attention_reference(problem, *numpy_of(tensors), keep)).max() < TOLERANCE


@pytest.mark.parametrize("dtype, head_dim", [("float16", 64), ("bfloat16", 64), ("bfloat16", 20)])
def test_half_precision_errs_at_most_twice_as_much_as_pytorch(template, run_kernel, make_operands, dtype, head_dim):
    problem = problem_of(head_dim=head_dim, dtype=dtype)
    keep = longformer(problem.q_len, problem.kv_len)
    q, k, v = make_operands(problem)
    expected = attention_reference(problem, *numpy_of([q, k, v]), keep)
    got = run_kernel(template, problem, keep, [q, k, v]).double().numpy()
    peer = F.scaled_dot_product_attention(q, k, v, torch.from_numpy(keep), enable_gqa=True).double().numpy()
    assert np.abs(got - expected).max() <= 2 * np.abs(peer - expected).max()


@pytest.mark.parametrize("layouts", [("bshd", "bhsd", "bshd", "bhsd"), ("sbhd", "bshd", "hbsd", "sbhd")])
def test_layouts(template, run_kernel, make_operands, layouts):
    problem = problem_of(head_dim=24, layouts=Layouts(*layouts))
    keep = longformer(problem.q_len, problem.kv_len)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, tensors).numpy()
    assert np.abs(got - attention_reference(problem, *numpy_of(tensors), keep)).max() < TOLERANCE


def test_views(template, run_kernel, make_operands):
    """q from (S, B, 3, H, D), keys and values from (B, S, Hkv, 2, D), not aligned to anything; one key head for all."""
    q_view = View(113 * 2 * 3 * 4 * 21, 21, 3 * 4 * 21, 21, 2 * 3 * 4 * 21)
    k_view, v_view = (View(2 * 203 * 2 * 42, i * 21, 203 * 84, 0 if i == 0 else 42, 84) for i in range(2))
    q_view = q_view._replace(offset=4 * 21)
    problem = problem_of(head_dim=21, layouts=Layouts(q_view, k_view, v_view, "bshd"))
    keep = longformer(problem.q_len, problem.kv_len)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, tensors).numpy()
    assert np.abs(got - attention_reference(problem, *numpy_of(tensors), keep)).max() < TOLERANCE


@pytest.mark.parametrize("kv_len", [1, 203])
def test_keys_and_values_without_a_stride_along_the_length(template, run_kernel, make_operands, kv_len):
    """One token has none, and one that is expanded to many."""
    views = [View(2 * 2 * 24 * 2, i * 24, 2 * 24 * 2, 24 * 2, 0) for i in range(2)]
    problem = problem_of(q_len=9, kv_len=kv_len, head_dim=24, layouts=Layouts("bhsd", *views, "bhsd"))
    keep = scattered(9, kv_len, 0.5) | (np.arange(kv_len) == 0)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, tensors).numpy()
    assert np.abs(got - attention_reference(problem, *numpy_of(tensors), keep)).max() < TOLERANCE


def test_every_configuration(template, run_kernel, make_operands):
    problem = problem_of(q_len=70, kv_len=1030, head_dim=32, heads=(1, 1))
    keep = longformer(problem.q_len, problem.kv_len)
    tensors = make_operands(problem)
    expected = attention_reference(problem, *numpy_of(tensors), keep)
    configs = template.configs(problem, None)
    assert len({config.label for config in configs}) == len(configs) > 1
    for config in configs:
        got = run_kernel(template, problem, keep, tensors, config=config).numpy()
        assert np.abs(got - expected).max() < TOLERANCE, config.label


@pytest.mark.parametrize(
    "bias_shape",
    [(2, 1, 1, 203), (1, 4, 113, 203), (1, 1, 113, 1), (2, 4, 1, 1)],
    ids=str,
)
def test_bias(template, run_kernel, make_operands, bias_shape):
    bias_dtype = {203: "bfloat16", 1: "float16"}.get(bias_shape[3]) if bias_shape[2] == 1 else "float32"
    problem = problem_of(head_dim=16, bias_shape=bias_shape, bias_dtype=bias_dtype)
    bias = torch.from_numpy(np.random.default_rng(3).normal(0, 2, bias_shape)).to(getattr(torch, bias_dtype))
    keep = longformer(problem.q_len, problem.kv_len)
    tensors = make_operands(problem)
    got = run_kernel(template, problem, keep, [*tensors, bias]).numpy()
    expected = attention_reference(problem, *numpy_of(tensors), keep, bias.double().numpy())
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("key_bias", [True, False], ids=["a bias per key", "a bias per score"])
def test_extreme_bias(template, run_kernel, make_operands, key_bias):
    """-inf excludes; finfo.min and the like are finite: a row of nothing else averages, as in PyTorch."""
    bias_shape = (2, 1, 1, 203) if key_bias else (2, 1, 113, 203)
    problem = problem_of(head_dim=16, bias_shape=bias_shape)
    tensors = make_operands(problem)
    bias = torch.zeros(bias_shape)
    bias[0, ..., 50:] = FINFO_MIN
    bias[0, ..., 10:20] = float("-inf")
    bias[1] = FINFO_MIN
    bias[1, ..., :150] = float("-inf")  # as many as a kernel takes at once, or more
    if not key_bias:
        bias[0, :, 3] = float("-inf")
        bias[1, :, 5:70, 170:] = float("-inf")
        bias[1, :, 80] = -1e4
        bias[1, :, 81] = 1e4
    keep = scattered(113, 203, 0.6)
    keep[90] = False
    keep[91, :190] = False
    got = run_kernel(template, problem, keep, [*tensors, bias]).numpy()
    expected = attention_reference(problem, *numpy_of(tensors), keep, bias.numpy())
    assert np.abs(got - expected).max() < TOLERANCE
    averages = tensors[2].numpy()[1, 0, 150:][keep[112, 150:]].mean(axis=0)
    assert np.abs(got[1, 0, 112] - averages).max() < TOLERANCE
    if not key_bias:
        assert not got[0, :, 3].any()


def test_scores_far_below_zero_after_blocks_that_keep_nothing(template, run_kernel, make_operands):
    """A row's first listed block may keep nothing of that row; its maximum must stay -inf, not become 0."""
    problem = problem_of(head_dim=16)
    q, k, v = make_operands(problem)
    q[..., 0], k[..., 0] = 40.0, -40.0
    keep = np.zeros((113, 203), bool)
    keep[0, :] = True
    keep[1:, 150:] = True
    got = run_kernel(template, problem, keep, [q, k, v]).numpy()
    expected = attention_reference(problem, *numpy_of([q, k, v]), keep)
    assert np.abs(got - expected).max() < 5e-4  # scores near -400: float32 resolves them to 3e-5
    assert np.abs(got).max() > 0.1


def test_rescaling_when_each_block_raises_the_maximum(template, run_kernel, make_operands):
    problem = problem_of(head_dim=16, kv_len=203)
    q, k, v = make_operands(problem)
    q[..., 0] = 8.0
    k[..., 0] = torch.linspace(-8, 8, 203)
    keep = scattered(113, 203, 0.5)
    got = run_kernel(template, problem, keep, [q, k, v]).numpy()
    assert np.abs(got - attention_reference(problem, *numpy_of([q, k, v]), keep)).max() < TOLERANCE


def test_nan_reaches_only_the_rows_that_read_it(template, run_kernel, make_operands):
    problem = problem_of(head_dim=16)
    q, k, v = make_operands(problem)
    q[0, 0, 7] = float("nan")
    keep = np.ones((113, 203), bool)
    got = run_kernel(template, problem, keep, [q, k, v])
    assert got[0, 0, 7].isnan().all()
    assert got.isnan().any(dim=-1).sum() == 1


def test_infinite_values_reach_all_rows(template, run_kernel, make_operands):
    """A block that ends past the last key multiplies nothing by its value: 0 times infinity is NaN."""
    problem = problem_of(head_dim=16)
    q, k, v = make_operands(problem)
    v[:, :, -1] = float("inf")
    got = run_kernel(template, problem, np.ones((113, 203), bool), [q, k, v])
    assert got.isposinf().all()


@pytest.mark.parametrize(
    "fill", [float("-inf"), -1e30, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min]
)
@pytest.mark.parametrize("rows", [1, 113])
def test_what_a_bias_masks_is_not_read(template, run_kernel, make_operands, rows, fill):
    """A key of NaNs or infinities under a bias that leaves nothing of a score, as where the mask is static."""
    problem = problem_of(head_dim=16, bias_shape=(1, 1, rows, 203))
    q, k, v = make_operands(problem)
    bias = torch.randn(problem.bias_shape)
    bias[..., [3, 77, 202]] = fill
    keep = np.ones((113, 203), bool)
    expected = attention_reference(problem, *numpy_of([q, k, v]), keep, bias.double().numpy())
    k[:, :, 3], k[:, :, 77], k[:, :, 202] = float("nan"), float("inf"), float("-inf")
    got = run_kernel(template, problem, keep, [q, k, v, bias])
    assert np.abs(got - expected).max() < TOLERANCE


def test_touches_nothing_past_the_operands(template, run_kernel, make_operands):
    """Operands lie in front of NaNs, which any read past the end turns into a wrong result, and so does the output."""
    problem = problem_of(q_len=67, kv_len=70, head_dim=20, v_head_dim=23, heads=(1, 1), dtype="float16")
    keep = np.ones((67, 70), bool)
    tensors = make_operands(problem)
    expected = run_kernel(template, problem, keep, tensors)

    def guarded(x):
        room = torch.full((x.numel() + 4096,), float("nan"), dtype=x.dtype)
        room[: x.numel()] = x.flatten()
        return room, room[: x.numel()].view(x.shape)

    room, out = guarded(torch.zeros_like(expected))
    run_kernel(template, problem, keep, [guarded(x)[1] for x in tensors], out=out)
    assert torch.equal(out, expected)
    assert room[out.numel() :].isnan().all()


def test_operands_need_no_alignment(template, run_kernel, make_operands):
    problem = problem_of(head_dim=64, bias_shape=(1, 1, 113, 203))
    keep = longformer(113, 203)
    tensors = [*make_operands(problem), torch.randn(1, 1, 113, 203)]

    def shifted(x):
        return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)

    expected = run_kernel(template, problem, keep, tensors)
    out = shifted(torch.zeros_like(expected))
    run_kernel(template, problem, keep, [shifted(x) for x in tensors], out=out)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("cpu", ["x86-64", "haswell"])
def test_narrower_vectors(template, run_kernel, make_operands, cpu):
    """SSE2 (4 lanes) and AVX2 (8 lanes), which every x86 machine of today can run."""
    if platform.machine() not in ("x86_64", "AMD64") or not llvm_cpu_has_features("avx2", parse_target("llvm")):
        pytest.skip("not an x86 machine with AVX2")
    problem = problem_of(head_dim=20, bias_shape=(1, 1, 113, 203))
    keep = longformer(113, 203)
    tensors = [*make_operands(problem), torch.randn(1, 1, 113, 203)]
    target = {"kind": "llvm", "mcpu": cpu, "mtriple": "x86_64-linux-gnu"}
    got = run_kernel(template, problem, keep, tensors, target=target).numpy()
    assert (
        np.abs(got - attention_reference(problem, *numpy_of(tensors[:3]), keep, tensors[3].numpy())).max() < TOLERANCE
    )
