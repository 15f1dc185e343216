"""FlexAttention inside a model, against PyTorch's own eager FlexAttention."""

import math

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

HEADS, LENGTH, DIM = 2, 32, 8
SLOPES, TABLE = torch.tensor([0.5, 0.25]), torch.randn(HEADS, 2 * LENGTH)

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention.*")


def window(b, h, q, k):
    return (q - k).abs() <= 3


def block_mask(mask_mod, batch=None, heads=None):
    return create_block_mask(mask_mod, batch, heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)


class Flex(nn.Module):
    def __init__(self, kv_heads=HEADS, **options):
        super().__init__()
        self.kv_heads, self.options = kv_heads, options

    def forward(self, x):
        q = x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        kv = q[:, : self.kv_heads]
        return flex_attention(q, kv, kv, **self.options)


@pytest.fixture
def x():
    return torch.randn(2, LENGTH, HEADS * DIM, generator=torch.Generator().manual_seed(0))


def engine_of(model, x, **options):
    engine = stof_tvm.build(model.eval(), QUICK_LLVM, (x,), tuning_logs=False, **options)
    torch.testing.assert_close(engine(x), model(x), atol=2e-5, rtol=2e-5)
    return engine


GROUPED = {"kv_heads": 1, "enable_gqa": True}
SPARSE = {
    "plain": ({}, 1.0),
    "block mask": ({"block_mask": block_mask(window)}, masks.sliding_window(3).density(LENGTH)),
    "a mask a head": ({"block_mask": block_mask(lambda b, h, q, k: q - k >= 4 * h, None, HEADS)}, None),
    "alibi": (
        {"score_mod": lambda s, b, h, q, k: s + SLOPES[h] * (k - q), "block_mask": block_mask(window), "scale": 0.3},
        masks.sliding_window(3).density(LENGTH),
    ),
    "relative": ({"score_mod": lambda s, b, h, q, k: s + TABLE[h, q - k + LENGTH]}, 1.0),
    "scaled twice": ({"score_mod": lambda s, b, h, q, k: (s * 2 - SLOPES[h]) / 3 + 1}, 1.0),
    "causal as a score_mod": (
        {"score_mod": lambda s, b, h, q, k: torch.where(q >= k, s, -math.inf)},
        masks.causal().density(LENGTH),
    ),
    "grouped": ({"kv_heads": 1, "enable_gqa": True, "block_mask": block_mask(window)}, None),
    "empty rows": ({"block_mask": block_mask(lambda b, h, q, k: (q > 4) & (k < 9))}, None),
    "soft cap": ({"score_mod": lambda s, b, h, q, k: 0.5 * torch.tanh(s / 0.5), "scale": 0.7}, 1.0),
    "soft cap, grouped, empty rows": (
        {
            "score_mod": lambda s, b, h, q, k: torch.tanh(s * 1.5) / 3,
            "block_mask": block_mask(lambda b, h, q, k: (q > 4) & window(b, h, q, k)),
            **GROUPED,
        },
        None,
    ),
    "soft cap and alibi": (
        {
            "score_mod": lambda s, b, h, q, k: 0.5 * torch.tanh(s / 0.5) + SLOPES[h] * (k - q),
            "block_mask": block_mask(lambda b, h, q, k: (q > 4) & (k < 9)),
        },
        None,
    ),
    "soft cap and causal as a score_mod": (
        {"score_mod": lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s), -math.inf)},
        masks.causal().density(LENGTH),
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("case", SPARSE)
def test_on_sparse_kernels(case, x):
    options, density = SPARSE[case]
    (site,) = engine_of(Flex(**options), x).report().sites
    assert site.rewritten and (density is None or site.density == pytest.approx(density))


DENSE = {
    "soft cap of the bias": lambda s, b, h, q, k: 5 * torch.tanh((s + SLOPES[h] * (k - q)) / 5),
    "soft cap twice": lambda s, b, h, q, k: torch.tanh(torch.tanh(s)),
    "squared": lambda s, b, h, q, k: s * s,
    "its own sign": lambda s, b, h, q, k: torch.where(s > 0, s, -math.inf),
    "a number instead": lambda s, b, h, q, k: torch.where(q >= k, s, 0.5),
    "negative": lambda s, b, h, q, k: -1 * s,
    "a factor a head": lambda s, b, h, q, k: s * SLOPES[h],
    "of an index": lambda s, b, h, q, k: s * (q - k),
    "twice": lambda s, b, h, q, k: s + s,
}


@torch.no_grad()
@pytest.mark.parametrize("case", DENSE)
def test_what_is_no_bias_is_right_all_the_same(case, x):
    engine = engine_of(Flex(score_mod=DENSE[case], block_mask=block_mask(lambda b, h, q, k: k < 20)), x)
    assert not any(site.rewritten and site.spelling == "sdpa" for site in engine.report().sites)


@torch.no_grad()
def test_a_soft_cap_in_half_precision(x):
    """The attention is one of half precision, and a mask of the user's restricts it."""
    model = Flex(score_mod=lambda s, b, h, q, k: 0.5 * torch.tanh(s / 0.5), block_mask=block_mask(window)).half()
    both = Flex(
        score_mod=lambda s, b, h, q, k: 0.5 * torch.tanh(s / 0.5),
        block_mask=block_mask(lambda b, h, q, k: window(b, h, q, k) & (q >= k)),
    )
    engine = stof_tvm.build(model, QUICK_LLVM, (x.half(),), mask=masks.causal(), tuning_logs=False)
    (site,) = engine.report().sites
    assert site.rewritten and site.shape.dtype == "float16"
    torch.testing.assert_close(engine(x.half()), both(x.half()), atol=3e-3, rtol=3e-3)


@torch.no_grad()
def test_a_mask_of_the_users_restricts(x):
    model, mask = Flex(block_mask=block_mask(window)), masks.causal()
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask=mask, tuning_logs=False)
    both = Flex(block_mask=block_mask(lambda b, h, q, k: window(b, h, q, k) & (q >= k)))
    torch.testing.assert_close(engine(x), both(x), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_a_mask_for_what_stays_dense_is_an_error(x):
    with pytest.raises(NotRewrittenError):
        stof_tvm.build(Flex(score_mod=DENSE["squared"]), QUICK_LLVM, (x,), mask=masks.causal())


@torch.no_grad()
@pytest.mark.parametrize("reads_inputs", [False, True])
def test_a_block_mask_made_in_forward(reads_inputs, x):
    class Made(nn.Module):
        def forward(self, x):
            lengths = (x[:, :, 0] > 0).sum(1)

            def kept(b, h, q, k):
                return k < lengths[b] if reads_inputs else q >= k

            q = x.unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            return flex_attention(q, q, q, block_mask=block_mask(kept, len(x) if reads_inputs else None))

    (site,) = engine_of(Made(), x).report().sites
    assert site.rewritten and (reads_inputs or site.density < 0.6)


@torch.no_grad()
def test_the_blocks_of_a_block_mask_count(x):
    """Eager PyTorch looks at the mask_mod only, its compiled kernels and we at the blocks as well."""
    counts, places = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[0, 1], [1, 0]]]], dtype=torch.int32)
    diagonal = BlockMask.from_kv_blocks(counts, places, BLOCK_SIZE=16)
    engine = stof_tvm.build(Flex(block_mask=diagonal), QUICK_LLVM, (x,), tuning_logs=False)
    expected = Flex(block_mask=block_mask(lambda b, h, q, k: q // 16 == k // 16))(x)
    torch.testing.assert_close(engine(x), expected, atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_the_log_sum_exp_is_refused(x):
    with pytest.raises(UnsupportedError, match="return_lse"):
        stof_tvm.build(Flex(return_lse=True), QUICK_LLVM, (x,))


@torch.no_grad()
def test_an_exported_program_stays_as_it_was(x):
    model = Flex(**SPARSE["alibi"][0])
    program = torch.export.export(model, (x,), strict=False)
    for _ in range(2):
        engine = stof_tvm.build(program, QUICK_LLVM, tuning_logs=False)
        torch.testing.assert_close(engine(x), model(x), atol=2e-5, rtol=2e-5)


@torch.no_grad()
def test_torch_compile(x):
    torch._dynamo.reset()
    model = Flex(**SPARSE["alibi"][0])
    plain = torch.compile(model, backend="stof", options={"target": QUICK_LLVM})
    torch.testing.assert_close(plain(x), model(x), atol=2e-5, rtol=2e-5)
