"""A given mask and queries whose rows are heads and tokens, folded: refused, where the rows of an image are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

B, H, S, D = 2, 4, 10, 6
MASK = masks.sliding_window(2)


class Shared(nn.Module):
    """Multi-query attention by SDPA of rows that are heads and queries."""

    def __init__(self, heads_first: bool, kv_len: int = S, scaled: bool = False):
        super().__init__()
        self.q, self.kv = nn.Linear(H * D, H * D), nn.Linear(H * D, 2 * D)
        self.heads_first, self.kv_len, self.scaled = heads_first, kv_len, scaled

    def forward(self, x):
        q, (k, v) = self.q(x).view(B, S, H, D), self.kv(x[:, : self.kv_len]).chunk(2, -1)
        q = q.transpose(1, 2) if self.heads_first else q
        q = q * 2 if self.scaled else q
        return F.scaled_dot_product_attention(q.reshape(B, 1, H * S, D), k[:, None], v[:, None])


class Given(nn.Module):
    """The same of q (B, H, S, D) that is an input, of which nothing is known."""

    def forward(self, q, k, v):
        return F.scaled_dot_product_attention(q.reshape(B, 1, -1, D), k, v)


class Image(nn.Module):
    """Attention of the rows and columns of an image among themselves, or to a text."""

    def __init__(self):
        super().__init__()
        self.embed, self.q, self.kv = nn.Conv2d(3, D, 2, 2), nn.Linear(D, D), nn.Linear(D, 2 * D)

    def forward(self, image, text=None):
        x = self.embed(image).flatten(2).mT
        k, v = self.kv(x if text is None else text).chunk(2, -1)
        return F.scaled_dot_product_attention(self.q(x)[:, None], k[:, None], v[:, None])


X = torch.randn(B, S, H * D, generator=torch.Generator().manual_seed(0))
Q, K = torch.randn(B, H, S, D), torch.randn(B, 1, S, D)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Shared(True), (X,)),
        (Shared(False), (X,)),
        (Shared(True, scaled=True), (X,)),
        (Shared(True, kv_len=7), (X,)),  # a weight made the heads
        (Shared(True, kv_len=4), (torch.randn(B, S, H * D),)),
        (Given(), (Q, K, K)),  # as many of one part as there are keys
    ],
)
def test_a_mask_is_refused(model, inputs):
    with pytest.raises(NotRewrittenError, match="40 rows of queries are dimensions of (4×10|10×4), folded"):
        stof_tvm.build(model, QUICK_LLVM, inputs, mask=MASK, verify=False)
    engine = stof_tvm.build(model, QUICK_LLVM, inputs)  # as it is
    assert torch.allclose(engine(*inputs), model(*inputs), atol=1e-5)


class Pooled(nn.Module):
    """Queries of one token, or of as few tokens that heads and queries are as many as the keys."""

    def __init__(self, length):
        super().__init__()
        self.q, self.kv, self.length = nn.Linear(H * D, H * D), nn.Linear(H * D, 2 * D), length

    def forward(self, x, y):
        q = self.q(x).view(B, self.length, H, D).transpose(1, 2).reshape(B, 1, H * self.length, D)
        k, v = self.kv(y).chunk(2, -1)
        return F.scaled_dot_product_attention(q, k[:, None], v[:, None])


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 7), (1, 4), (2, 8), (3, 5)])
def test_a_mask_is_refused_whatever_the_lengths(q_len, kv_len):
    inputs = torch.randn(B, q_len, H * D), torch.randn(B, kv_len, H * D)
    with pytest.raises(NotRewrittenError, match=f"{H * q_len} rows of queries are dimensions of 4.*, folded"):
        stof_tvm.build(Pooled(q_len), QUICK_LLVM, inputs, mask=MASK, verify=False)


class Expanded(nn.Module):
    """Each token becomes two, which attend to one another."""

    def __init__(self):
        super().__init__()
        self.expand, self.qkv = nn.Linear(D, 2 * D), nn.Linear(D, 3 * D)

    def forward(self, x):
        q, k, v = self.qkv(self.expand(x).view(B, 2 * S, D))[:, None].chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v)


def test_tokens_that_a_weight_made_are_a_sequence():
    engine = stof_tvm.build(Expanded(), QUICK_LLVM, (X[..., :D].contiguous(),), mask=MASK)
    assert engine.report().rewritten


class Both(nn.Module):
    """The same beside an ordinary attention."""

    def __init__(self):
        super().__init__()
        self.shared = Shared(True)

    def forward(self, x):
        heads = x.view(B, S, H, D).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads), self.shared(x)


def test_a_mask_that_comes_after_the_build_is_refused():
    engine = stof_tvm.build(Both(), QUICK_LLVM, (X,), replaceable_masks=True, verify=False)
    with pytest.raises(NotRewrittenError, match="40 rows of queries are dimensions of 4×10, folded"):
        engine.with_mask(MASK)
    assert engine.with_mask({"": MASK})(X)[0].isfinite().all()


def test_a_rule_is_refused():
    with pytest.raises(UnsupportedError, match="40 rows of queries are dimensions of 4×10, folded"):
        stof_tvm.build(Shared(True), QUICK_LLVM, (X,), mask=masks.runtime.top_blocks(1, block=32), verify=False)


@pytest.mark.parametrize("text", [None, torch.randn(B, 9, D)], ids=["itself", "text"])
def test_the_rows_of_an_image_are_a_sequence(text):
    model, image = Image(), torch.randn(B, 3, 8, 6)
    inputs = (image,) if text is None else (image, text)
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, mask=MASK)
    assert engine.report().rewritten


def test_rows_of_which_nothing_is_known_are_a_sequence():
    q, k = torch.randn(B, 3, 5, D), torch.randn(B, 1, 7, D)
    engine = stof_tvm.build(Given(), QUICK_LLVM, (q, k, k), mask=MASK, verify=False)
    expected = F.scaled_dot_product_attention(q.reshape(B, 1, 15, D), k, k, MASK.dense(15, 7)).nan_to_num()
    assert torch.allclose(engine(q, k, k), expected, atol=1e-5)
