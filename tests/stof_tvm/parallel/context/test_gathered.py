"""A rank's view of a mask, compiled, against the rows and columns of the dense one."""

import numpy as np
import pytest

from stof_tvm import masks
from stof_tvm.errors import MaskError
from stof_tvm.parallel.context.gathered import Columns, Gathered
from tests.stof_tvm.parallel.context.some_masks import some_masks

LENGTH = 333
MASKS = some_masks(LENGTH) | {
    "video": masks.neighborhood((9, 37), (3, 9)),
    "formula": masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx) % 5 < 2),
    "mixed formula": masks.from_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx * kv_idx) % 7 == 0),
}
TOKENS = {
    "a run": np.arange(64, 201),
    "runs of eights": np.concatenate([np.arange(8, 40), np.arange(96, 128), np.arange(320, 333)]),
    "any": np.flatnonzero(np.random.default_rng(1).random(LENGTH) < 0.4),
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", MASKS)
def test_rows_and_columns_are_those_of_the_mask(name, tokens):
    mask, rows = MASKS[name], TOKENS[tokens]
    at = TOKENS["runs of eights"] if tokens == "a run" else TOKENS[tokens]
    counts = np.arange(len(at)) % 5 != 3
    width = len(at) + 19
    gathered = Gathered(mask, LENGTH, rows, [[Columns(at, counts)]], width)
    dense = mask.dense(LENGTH).numpy().reshape(-1, LENGTH, LENGTH)
    expected = np.zeros((len(dense), len(rows), width), bool)
    expected[:, :, : len(at)] = dense[:, rows][:, :, at] & counts
    for block, stride in (((16, 32), 1), ((64, 64), 1), ((128, 64), 1), ((16, 32), 3)):
        compiled = gathered.compile(len(rows), width, block, stride).validate()
        assert (compiled.to_dense()[0] == expected).all()
    assert (gathered.dense(len(rows), width).numpy() == expected.reshape(gathered.dense(len(rows), width).shape)).all()


WORDS = [
    masks.neighborhood((6, 10, 12), (1, 5, 5)),
    masks.sliding_tile((6, 10, 12), (2, 5, 4), (2, 5, 12), order="row-major"),
    masks.radial((6, 120), decay=0.25, least=1),
]
EIGHTS = {
    "two frames": np.r_[0:120, 240:360],
    "blocks that begin at multiples": np.concatenate([128 * k + np.r_[0:8, 16:24, 32:48, 64:96] for k in range(5)]),
}


@pytest.mark.parametrize("tokens", EIGHTS)
@pytest.mark.parametrize("mask", WORDS, ids=repr)
def test_words_of_columns_that_do_not_follow_one_another(mask, tokens):
    """Masks of videos answer for 64 columns in a row with one word."""
    tokens, dense = EIGHTS[tokens], mask.dense(720).numpy()
    for rows in (tokens, np.arange(720)):
        gathered = Gathered(mask, 720, rows, [[Columns(tokens)]], len(tokens))
        for block in ((8, 8), (16, 32), (64, 64)):
            found = gathered.compile(len(rows), len(tokens), block).validate().to_dense()[0, 0]
            assert (found == dense[rows][:, tokens]).all()


def test_heads_may_have_columns_of_their_own():
    mask, rows = MASKS["by head"], np.arange(40, 80)
    own = [Columns(np.arange(h, 30 + h)) for h in range(3)] + [Columns(np.zeros(0, np.int64))]
    gathered = Gathered(mask, LENGTH, rows, [own], 64)
    found = gathered.compile(40, 64).to_dense()[0]
    dense = mask.dense(LENGTH).numpy()[0]
    for h in range(3):
        assert (found[h, :, :30] == dense[h, 40:80, h : 30 + h]).all() and not found[h, :, 30:].any()
    assert not found[3].any()


def test_it_has_its_lengths_and_an_identity():
    rows, columns = np.arange(16), [[Columns(np.arange(16))]]
    gathered = Gathered(MASKS["causal"], LENGTH, rows, columns, 16)
    with pytest.raises(MaskError, match=r"does not fit \(q_len, kv_len\) = \(16, 17\)"):
        gathered.compile(16, 17)
    assert gathered == Gathered(MASKS["causal"], LENGTH, rows.copy(), columns, 16)
    assert gathered != Gathered(MASKS["causal"], LENGTH, rows + 1, columns, 16)
    assert gathered != Gathered(MASKS["causal"], LENGTH, rows, [[Columns(np.arange(16), np.arange(16) > 0)]], 16)
    assert gathered != Gathered(MASKS["dilated"], LENGTH, rows, columns, 16)
