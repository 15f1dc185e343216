"""Engines whose tokens are moved to tiles inside compute what PyTorch does under the dense mask of rows."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.token_order.video import CANVAS, MIXING, TILE, TOKENS, TOKENWISE, WINDOW, Video, make_inputs

TILES = masks.sliding_tile(CANVAS, TILE, WINDOW, order="row-major")


def masked(model, inputs, mask):
    """PyTorch's result where each attention of the layers has the dense mask."""
    dense, attend, inside = mask.dense(TOKENS), torch.nn.functional.scaled_dot_product_attention, []
    hooks = []
    for layer in model.layers:
        hooks.append(layer.attention.register_forward_pre_hook(lambda *_: inside.append(1)))
        hooks.append(layer.attention.register_forward_hook(lambda *_: inside.clear()))
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        given = lambda q, k, v, is_causal=False: attend(q, k, v, dense if inside else None, is_causal=is_causal)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", given)
        found = model(*inputs)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "between, batch, moved",
    [
        (TOKENWISE["nothing"], 2, True),
        (TOKENWISE["gates by the mean of all tokens"], 1, True),
        (TOKENWISE["attention without a mask"], 1, True),
        (TOKENWISE["products of channels"], 1, True),
        (MIXING["a sum up to each token"][0], 1, False),
    ],
)
def test_engines(between, batch, moved):
    model, inputs = Video(between).eval(), make_inputs(batch)
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, {"layers.*.attention": TILES})
    expected = masked(model, inputs, TILES)
    torch.testing.assert_close(engine(*inputs), expected, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert (model(*inputs) - expected).abs().max() > 1e-2  # the mask counts
    assert (masked(model, inputs, masks.sliding_tile(CANVAS, TILE, WINDOW)) - expected).abs().max() > 1e-2
    rows = [row for row in engine.report().rewritten if row.density < 1]
    words = "order of the mask's tiles" if moved else "tokens stay in the model's order"
    assert len(rows) == 2 and all(words in note for row in rows for note in row.notes)
    assert ("cumsum" in str(engine.report())) != moved


@pytest.mark.slow
def test_an_engine_of_wan(tmp_path):
    pytest.importorskip("diffusers")
    from tests.stof_tvm.masks.canvas import test_in_tiles

    model, inputs, _ = test_in_tiles.wan(layers=2)
    rows = masks.sliding_tile(test_in_tiles.CANVAS, test_in_tiles.TILE, test_in_tiles.WINDOW, order="row-major")
    with torch.no_grad(), test_in_tiles.Masked(rows.dense(TOKENS)):
        expected = model(**inputs)[0]
    engine = stof_tvm.build(model, QUICK_LLVM, inputs, {"blocks.*.attn1": rows})
    torch.testing.assert_close(engine(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
    moved = [row.site for row in engine.report().rewritten if any("mask's tiles" in note for note in row.notes)]
    assert moved == ["blocks.0.attn1", "blocks.1.attn1"]
    engine.save(tmp_path / "wan.stof")
    torch.testing.assert_close(stof_tvm.load(tmp_path / "wan.stof")(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
