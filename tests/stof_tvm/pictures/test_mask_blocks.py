"""Pictures of masks show which blocks are full, part and empty."""

import numpy as np
import pytest

from stof_tvm import masks, pictures
from stof_tvm.pictures import mask_blocks as module
from tir_kernels.errors import InputError
from tir_kernels.masks.block_sparse import EMPTY, FULL, PART, BlockSparseMask


def states_drawn(ax) -> np.ndarray:
    """The state of each pixel, by its colour."""
    image = np.asarray(ax.images[0].get_array())
    colours = module._colours()
    return np.argmax((image[:, :, None] == colours).all(axis=3), axis=2)


def labels_of(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_short_masks_are_drawn_element_by_element():
    mask = masks.sliding_window(10)
    ax = mask.plot(48, 40, block=(16, 8))
    kept = np.zeros((48, 40), bool)
    kept[:] = mask.dense(48, 40).numpy()
    drawn = states_drawn(ax)
    assert drawn.shape == (48, 40) and np.isin(drawn, (PART, FULL)).sum() == kept.sum()
    assert (np.isin(drawn, (PART, FULL)) == kept).all()
    blocks = drawn.reshape(3, 16, 5, 8).swapaxes(1, 2).reshape(15, -1)
    for block, expected in zip(blocks, kept.reshape(3, 16, 5, 8).swapaxes(1, 2).reshape(15, -1)):
        allowed = {FULL} if expected.all() else {PART, module.DROPPED} if expected.any() else {EMPTY}
        assert set(block) <= allowed
    assert ax.get_title().startswith("sliding_window(10)\n") and "15 blocks of 16×8" in ax.get_title()


def test_what_lies_past_a_ragged_edge_is_not_drawn():
    ax = masks.causal().plot(20, 30)
    assert ax.get_xlim() == (0, 30) and ax.get_ylim() == (20, 0)
    drawn = states_drawn(ax)
    assert drawn.shape == (64, 64) and not drawn[20:].any() and not drawn[:, 30:].any()


def test_long_masks_are_drawn_block_by_block(monkeypatch):
    monkeypatch.setattr(module, "PIXELS", 32)
    mask = masks.causal() & masks.sliding_window(30)
    drawn = states_drawn(mask.plot(200, 96, block=(8, 8)))
    padded = np.zeros((200, 96), bool)
    padded[:] = mask.dense(200, 96).numpy()
    counts = padded.reshape(25, 8, 12, 8).sum(axis=(1, 3))
    np.testing.assert_array_equal(drawn, np.where(counts == 64, FULL, np.where(counts > 0, PART, EMPTY)))


def test_very_long_masks_are_drawn_in_larger_blocks(monkeypatch):
    monkeypatch.setattr(module, "PIXELS", 32)
    monkeypatch.setattr(module, "MAX_BLOCKS", 4)
    ax = masks.causal().plot(200, 96, block=(8, 8))
    assert states_drawn(ax).shape == (4, 2) and "blocks of 64×64" in ax.get_title()


def test_states_are_those_of_the_storage():
    dense = np.zeros((16, 24), bool)
    dense[:8, :8] = dense[9, 17] = True
    states = module.block_states(BlockSparseMask.from_dense(dense, (8, 8)))
    assert states.tolist() == [[FULL, EMPTY, EMPTY], [EMPTY, EMPTY, PART]]


def test_a_panel_for_each_head_and_one_where_heads_share():
    mask = masks.per_head([masks.causal(), masks.sliding_window(8), ~masks.causal()])
    visible = [ax for ax in pictures.block_mask(mask, 32).axes if ax.get_visible()]
    assert [ax.get_title().split(":")[0] for ax in visible] == ["head 0", "head 1", "head 2"]
    assert len({states_drawn(ax).tobytes() for ax in visible}) == 3
    one = pictures.block_mask(mask, 32, head=1)
    assert [ax.get_title().split(":")[0] for ax in one.axes] == ["head 1"]
    shared = pictures.block_mask(masks.padding([5, 30]), 20, 30, batch=1)
    assert len(shared.axes) == 1 and "100.0% kept" in shared.axes[0].get_title()
    assert labels_of(shared) == ["full", "part: kept", "part: dropped"]
    assert labels_of(pictures.block_mask(masks.causal(), module.PIXELS + 1)) == ["full", "part"]


def test_no_more_panels_than_can_be_read(monkeypatch):
    monkeypatch.setattr(module, "MAX_PANELS", 2)
    figure = pictures.block_mask(masks.per_head([masks.causal()] * 3), 16)
    assert len(figure.axes) == 2 and "heads 0 … 1 of 3" in figure.get_suptitle()
    assert figure.get_suptitle().startswith("per_head([")
    assert pictures.block_mask(masks.causal(), 16, name="a rule").get_suptitle() == "a rule"


@pytest.mark.parametrize(("wrong", "why"), [({"head": 3}, "head 3 is not in 0…0"), ({"batch": -1}, "batch -1 is not")])
def test_entries_that_a_mask_does_not_have(wrong, why):
    with pytest.raises(InputError, match=why):
        pictures.block_mask(masks.causal(), 16, **wrong)


@pytest.mark.parametrize("heads", [1, 3, 4, 6, 12])
def test_titles_do_not_overlap(heads):
    mask = masks.per_head([masks.sliding_window(6 + head) for head in range(heads)])
    figure = pictures.block_mask(mask, 96, block=(16, 16))
    figure.canvas.draw()
    panels = [axes.title.get_window_extent() for axes in figure.axes if axes.get_visible()]
    whole = figure._suptitle.get_window_extent()
    assert not [panel for panel in panels if panel.overlaps(whole)]
