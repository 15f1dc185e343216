"""Engines whose tokens are moved to tiles inside compute what PyTorch does under the dense mask of rows."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import MaskError
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


class Learned(torch.nn.Module):
    """Two attentions under the mask, and between them one whose queries, keys or values are a parameter."""

    def __init__(self, learned: str):
        super().__init__()
        self.learned, self.mask = learned, None
        self.parameter = torch.nn.Parameter(3 * torch.randn(1, 2, TOKENS, 8))
        self.first, self.last = Attend(self), Attend(self)

    def forward(self, x):
        x = x + self.first(x)
        given = dict.fromkeys("qkv", x.unflatten(-1, (2, -1)).transpose(1, 2)) | {self.learned: self.parameter}
        x = x + torch.nn.functional.scaled_dot_product_attention(*given.values()).transpose(1, 2).flatten(2)
        return x + self.last(x)


class Attend(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.mask_of = lambda: model.mask

    def forward(self, x):
        q = x.unflatten(-1, (2, -1)).transpose(1, 2)
        found = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=self.mask_of())
        return found.transpose(1, 2).flatten(2)


@torch.no_grad()
@pytest.mark.parametrize("learned", ["q", "k", "v"])
def test_a_parameter_that_an_attention_reads_is_moved(learned):
    torch.manual_seed(0)
    model, x = Learned(learned).eval(), torch.randn(1, TOKENS, 16)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), {"first": TILES, "last": TILES}, verify=False)
    model.mask = TILES.dense(TOKENS)
    torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_canvas_of_another_number_of_tokens():
    wrong = masks.sliding_tile((3, 4, 7), TILE, (2, 2, 3), order="row-major")
    with pytest.raises(MaskError, match="is 84 tokens, must be q_len=72"):
        stof_tvm.build(Learned("q").eval(), QUICK_LLVM, (torch.randn(1, TOKENS, 16),), {"first": wrong})


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
