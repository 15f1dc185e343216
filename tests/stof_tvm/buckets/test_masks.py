"""Masks of a range: those of places are taken, and what they keep does not change with the lengths; others are not."""

import pytest
import torch
from torch.export import Dim

import stof_tvm
from stof_tvm import masks
from stof_tvm.buckets.masks import RangeMasks
from stof_tvm.errors import MaskError, NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM

SIZES = (2, 3, 40, 40)


def by_modulo(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx) % 3 == 0


def of_heads(b, h, q_idx, kv_idx):
    return q_idx - kv_idx >= -h


OF_PLACES = {
    "causal": masks.causal(),
    "window": masks.sliding_window(4),
    "dilated": masks.dilated_window(3, 2),
    "strided": masks.strided(5),
    "fixed": masks.fixed(8, 2),
    "a-shape": masks.a_shape(2, 4),
    "prefix": masks.prefix_lm(6),
    "global": masks.global_tokens([0, 3]) | masks.sliding_window(1),
    "longformer": masks.longformer(3, 2),
    "bigbird": masks.bigbird(2, 1, 0.3, block=8),
    "vertical-slash": masks.vertical_slash([0, 2], [0, 3]),
    "function": masks.from_mask_mod(by_modulo),
    "function of heads": of_heads,
    "joined": (masks.sliding_window(4) & ~masks.dilated_window(2, 2)) | masks.causal(),
    "by head": masks.per_head([masks.causal(), masks.sliding_window(2), masks.strided(3)]),
}


@pytest.mark.parametrize("name", OF_PLACES)
def test_a_mask_of_places_keeps_the_same_at_every_length(name):
    mask = RangeMasks(OF_PLACES[name]).given_for("", SIZES)
    assert mask.has_fixed_places
    large = mask.dense(40)
    for length in (4, 7, 16, 33):
        small = mask.dense(length)
        assert torch.equal(small, large[..., :length, :length])
        assert small.any(-1).all()


@pytest.mark.parametrize(
    "mask",
    [
        masks.bigbird(), masks.longformer(3), masks.longformer(global_tokens=1), masks.causal("bottom-right"),
        masks.document([8, 32]), masks.padding([8, 40]), masks.from_tensor(torch.zeros(40, 40)),
        torch.ones(40, 40).bool(),
        masks.block_sparse(torch.ones(5, 5), 8), masks.causal() & masks.document([8, 32]), ~masks.bigbird(),
        masks.per_head([masks.causal(), masks.causal(), masks.bigbird()]),
        masks.sliding_window(2) | masks.longformer(3),
    ],
    ids=repr,
)  # fmt: skip
def test_a_mask_that_depends_on_lengths_is_an_error(mask):
    with pytest.raises(MaskError, match=r"the model\): the mask .* depends on the lengths.*lazy=True"):
        RangeMasks(mask).given_for("", SIZES)


def test_a_row_that_a_shorter_input_leaves_empty_is_an_error():
    later = masks.from_mask_mod(lambda b, h, q_idx, kv_idx: kv_idx > q_idx)
    with pytest.raises(MaskError, match="keeps no key up to row 0's own in that row, which is empty in an input of 1"):
        RangeMasks(later).given_for("", SIZES)
    fifth = masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx != 5) | (kv_idx == 7))
    with pytest.raises(MaskError, match="row 5's own"):
        RangeMasks(fifth).given_for("", SIZES)
    RangeMasks(masks.global_tokens(1)).given_for("", SIZES)  # all rows keep token 0


def test_other_lengths_of_keys():
    RangeMasks(masks.sliding_window(50)).given_for("", (2, 3, 40, 20))
    with pytest.raises(MaskError, match="keeps no key up to"):
        RangeMasks(masks.sliding_window(5)).given_for("", (2, 3, 40, 20))


class OfInputs(torch.nn.Module):
    """Grouped heads by einsum, of inputs: of one query nothing tells heads and queries apart."""

    def forward(self, q, k, v):
        weights = torch.einsum("bkgid,bkjd->bkgij", q, k).softmax(-1)
        return torch.einsum("bkgij,bkjd->bkgid", weights, v)


def test_an_attention_that_stays_dense_at_one_size_is_told_with_the_size():
    q, (k, v) = torch.randn(1, 2, 4, 8, 16), torch.randn(2, 1, 2, 8, 16)
    length = Dim("length", max=8)
    with pytest.raises(NotRewrittenError, match=r"so it is for inputs of q \(1, 2, 4, 1, 16\), .* a larger least size"):
        stof_tvm.build(
            *(OfInputs(), QUICK_LLVM, (q, k, v), masks.sliding_window(3)),
            dynamic_shapes={"q": {3: length}, "k": {2: length}, "v": {2: length}},
            buckets=[1, 8],
        )


def test_so_is_one_that_is_compiled_at_its_first_call():
    q, (k, v) = torch.randn(1, 2, 4, 8, 16), torch.randn(2, 1, 2, 8, 16)
    shapes = {"q": {3: Dim("length", max=8)}, "k": {2: Dim("length", max=8)}, "v": {2: Dim("length", max=8)}}
    options = {"dynamic_shapes": shapes, "lazy": True, "verify": False}
    engine = stof_tvm.build(OfInputs(), QUICK_LLVM, (q, k, v), masks.sliding_window(3), **options)
    engine(q, k, v)
    with pytest.raises(NotRewrittenError, match=r"for inputs of q \(1, 2, 4, 1, 16\), .*: 1 attention\(s\) stay dense"):
        engine(q[:, :, :, :1], k[:, :, :1], v[:, :, :1])
