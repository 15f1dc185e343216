"""Tokens are moved once where every operator does the same to each of them, and stay where one does not."""

import pytest
import tvm

from relax_passes.attention.composite import NOTES, is_attention, match_attention
from relax_passes.attention.replaceable_masks import ReplaceableMasks
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.pipeline import run_pipeline
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.token_order.video import CANVAS, MIXING, TILE, TOKENWISE, WINDOW, Video, make_inputs

TILES = masks.sliding_tile(CANVAS, TILE, WINDOW, order="row-major")


def ordered(model, mask=TILES, inputs=None, **given):
    """The module behind the pass, and what the report says of each attention."""
    paths = mask if isinstance(mask, dict) else {"layers.*.attention": mask}
    imported = import_model(model.eval(), inputs or make_inputs(), {})
    mod = run_pipeline(imported.mod, QUICK_LLVM, SiteMasks(paths, takes_rules=True), until="order_tokens", **given)
    return mod, {str(site): str(note) for site, note in mod.attrs[NOTES] if "tokens" in str(note)}


def gathers(mod) -> int:
    """How many takes there are at run time."""
    mod = run_pipeline(mod, QUICK_LLVM, SiteMasks(None), after="merge_projections", until="canonicalize_operators")
    return sum(operator(value) == "take" for value in Bindings(mod["main"]).values.values())


def reordered(mod) -> list[str]:
    """The paths of the attentions whose tokens stand in the masks' order."""
    calls = [match_attention(mod, value) for value in Bindings(mod["main"]).values.values()]
    return [call.site for call in calls if call is not None and call.reordered]


@pytest.mark.parametrize("what", TOKENWISE)
def test_two_gathers_whatever_is_done_to_each_token(what):
    mod, notes = ordered(Video(TOKENWISE[what], layers=3))
    assert reordered(mod) == [f"layers.{n}.attention" for n in range(3)]
    assert gathers(mod) == 2
    assert all("order of the mask's tiles" in note for note in notes.values()) and len(notes) == 3


@pytest.mark.parametrize("what", MIXING)
def test_near_misses_stay_as_they_are(what):
    between, name = MIXING[what]
    mod, notes = ordered(Video(between))
    assert not reordered(mod)
    assert all("tokens stay in the model's order" in note and name in note for note in notes.values()) and notes


def test_a_refused_module_is_not_changed():
    between, _ = MIXING["a sum up to each token"]
    model = Video(between).eval()
    given = {"layers.*.attention": TILES}
    imported = import_model(model, make_inputs(), {})
    before = run_pipeline(imported.mod, QUICK_LLVM, SiteMasks(given), until="shard_tensors")
    after = run_pipeline(before, QUICK_LLVM, SiteMasks(given), after="shard_tensors", until="order_tokens")
    tvm.ir.assert_structural_equal(after["main"], before["main"])


def test_what_mixes_tokens_behind_the_last_attention_is_no_reason():
    class Joined(Video):
        def forward(self, video, text):
            return super().forward(video, text).flatten(2).cumsum(2)

    mod, _ = ordered(Joined())
    assert len(reordered(mod)) == 2 and gathers(mod) == 2


def test_layers_of_other_tiles_are_a_reason():
    other = masks.sliding_tile(CANVAS, (3, 2, 2), (3, 2, 2), order="row-major")
    mod, notes = ordered(Video(), {"layers.0.attention": TILES, "layers.1.attention": other})
    assert not reordered(mod)
    assert all("wants another order" in note for note in notes.values()) and len(notes) == 2


def test_heads_may_have_windows_of_their_own():
    wide = masks.sliding_tile(CANVAS, TILE, (4, 4, 6), order="row-major")
    mod, _ = ordered(Video(), masks.per_head([TILES, wide]))
    assert len(reordered(mod)) == 2
    other = masks.sliding_tile(CANVAS, (3, 2, 2), (3, 2, 2), order="row-major")
    mod, notes = ordered(Video(), masks.per_head([TILES, other]))
    assert not reordered(mod) and not notes


@pytest.mark.parametrize("mask", [masks.sliding_tile(CANVAS, TILE, WINDOW), masks.sliding_window(8), TILES & TILES])
def test_masks_that_know_no_order_move_nothing(mask):
    mod, notes = ordered(Video(), mask)
    assert not reordered(mod) and not notes


def test_a_module_that_is_causal_at_another_call():
    mod, _ = ordered(Video(lambda model, x: x + model.extra(x) + model.extra(x, causal=True)), {"extra": TILES})
    assert not reordered(mod)
    mod, _ = ordered(Video(lambda model, x: x + model.extra(x) + model.extra(x)), {"extra": TILES})
    assert len(reordered(mod)) == 2 and gathers(mod) == 2


def test_masks_that_may_be_replaced_move_nothing():
    mod, _ = ordered(Video(), replaceable=ReplaceableMasks())
    assert not reordered(mod)


def test_batches_and_the_number_of_attentions():
    mod, _ = ordered(Video(), inputs=make_inputs(3))
    assert len(reordered(mod)) == 2 and gathers(mod) == 2
    assert sum(is_attention(function) for function in mod.functions.values()) == 4
