"""Models of diffusers whose blocks see tokens tile by tile compute what they did, masked or not."""

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError
from tests.models.quick_llvm import QUICK_LLVM

diffusers = pytest.importorskip("diffusers")

CANVAS, TILE, WINDOW = (3, 4, 6), (2, 2, 3), (2, 2, 6)
TOKENS, TEXT = 72, 5
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
VIDEO = {"in_channels": 4, "out_channels": 4}


class Masked(TorchFunctionMode):
    """Adds a dense mask to every attention of tokens with one another, or with the text beside them."""

    def __init__(self, mask):
        super().__init__()
        self.mask, self.calls = mask, 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if (
            function is F.scaled_dot_product_attention
            and args
            and args[0].shape[2] == args[1].shape[2] == len(self.mask)
        ):
            kwargs["attn_mask"], self.calls = self.mask, self.calls + 1
        elif function is F.scaled_dot_product_attention and "query" in kwargs:
            if kwargs["query"].shape[2] == kwargs["key"].shape[2] == len(self.mask):
                kwargs["attn_mask"], self.calls = self.mask, self.calls + 1
        return function(*args, **kwargs)


def wan(layers=2):
    torch.manual_seed(0)
    sizes = {"text_dim": 24, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 16, "num_layers": layers}
    model = diffusers.WanTransformer3DModel(**HEADS, **VIDEO, **sizes).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 8, 12),
        "timestep": torch.tensor([7.0]),
        "encoder_hidden_states": torch.randn(1, TEXT, 24),
        "return_dict": False,
    }
    return model, inputs, dict(blocks=model.blocks, tables={"rotary_emb": 1})


def hunyuan():
    torch.manual_seed(0)
    sizes = {"num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": 24}
    model = diffusers.HunyuanVideoTransformer3DModel(
        **HEADS, **VIDEO, **sizes, pooled_projection_dim=12, rope_axes_dim=(4, 6, 6)
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 4, 3, 8, 12),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": torch.randn(1, TEXT, 24),
        "encoder_attention_mask": torch.ones(1, TEXT, dtype=torch.bool),
        "pooled_projections": torch.randn(1, 12),
        "guidance": torch.tensor([1000.0]),
        "return_dict": False,
    }
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    return model, inputs, dict(blocks=blocks, tables={"freqs_cis": 0, "image_rotary_emb": 0, "attention_mask": 3})


def flux():
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, in_channels=4, joint_attention_dim=24, pooled_projection_dim=12,
        guidance_embeds=False, axes_dims_rope=(4, 6, 6), **HEADS,
    ).eval()  # fmt: skip
    ids = torch.stack(torch.meshgrid(torch.zeros(1), torch.arange(6.0), torch.arange(12.0), indexing="ij"), -1)
    inputs = {
        "hidden_states": torch.randn(1, 72, 4),
        "timestep": torch.tensor([0.7]),
        "encoder_hidden_states": torch.randn(1, TEXT, 24),
        "pooled_projections": torch.randn(1, 12),
        "img_ids": ids.reshape(72, 3),
        "txt_ids": torch.zeros(TEXT, 3),
        "return_dict": False,
    }
    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    return model, inputs, dict(blocks=blocks, tables={"image_rotary_emb": 0}, result=1, text_first=True)


def test_wan_is_the_same_in_tiles():
    model, inputs, where = wan()
    mask = masks.sliding_tile(CANVAS, TILE, WINDOW, order="row-major").dense(TOKENS)
    assert not torch.equal(mask, masks.sliding_tile(CANVAS, TILE, WINDOW).dense(TOKENS))
    with torch.no_grad(), Masked(mask) as rows:
        expected = model(**inputs)[0]
    with torch.no_grad(), masks.in_tiles(canvas=CANVAS, tile=TILE, tokens="hidden_states", **where):
        with Masked(masks.sliding_tile(CANVAS, TILE, WINDOW).dense(TOKENS)) as tiles:
            found = model(**inputs)[0]
    assert rows.calls == tiles.calls == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (model(**inputs)[0] - expected).abs().max() > 1e-3  # the context is closed, and the mask counts


@pytest.mark.parametrize("make, canvas, tile", [(hunyuan, CANVAS, TILE), (flux, (6, 12), (4, 4))])
def test_text_beside_the_canvas(make, canvas, tile):
    model, inputs, where = make()
    first = where.get("text_first", False)
    window = (1, 2, 6)[-len(canvas) :] if len(canvas) == 3 else tile
    window = tuple(max(reach, step) // step * step for reach, step in zip(window, tile))
    of = lambda order: masks.sliding_tile(canvas, tile, window, TEXT, order, first).dense(TOKENS + TEXT)
    with torch.no_grad(), Masked(of("row-major")) as rows:
        expected = model(**inputs)[0]
    with torch.no_grad(), masks.in_tiles(canvas=canvas, tile=tile, tokens="hidden_states", text=TEXT, **where):
        with Masked(of("tiles")) as tiles:
            found = model(**inputs)[0]
    assert rows.calls == tiles.calls == 2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert (model(**inputs)[0] - expected).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("order", ["row-major", "tiles"])
def test_engines_of_wan(order):
    model, inputs, where = wan(layers=1)
    with torch.no_grad(), Masked(masks.sliding_tile(CANVAS, TILE, WINDOW, order="row-major").dense(TOKENS)):
        expected = model(**inputs)[0]
    mask = {"blocks.*.attn1": masks.sliding_tile(CANVAS, TILE, WINDOW, order=order)}
    if order == "tiles":
        with masks.in_tiles(canvas=CANVAS, tile=TILE, tokens="hidden_states", **where):
            engine = stof_tvm.build(model, QUICK_LLVM, inputs, mask)
    else:
        engine = stof_tvm.build(model, QUICK_LLVM, inputs, mask)
    torch.testing.assert_close(engine(**inputs)[0], expected, rtol=1e-4, atol=1e-4)
    assert [row.site for row in engine.report().rewritten if row.density < 1] == ["blocks.0.attn1"]


class Block(torch.nn.Module):
    def forward(self, x, scale=None, other=None):
        return x if other is None else (other, x)


def test_what_is_not_named_is_refused():
    block = Block()
    x = torch.randn(2, TOKENS, 8)
    with masks.in_tiles([block], CANVAS, TILE, "x", tables={"scale": 1}):
        assert torch.equal(block(x), x)
        assert torch.equal(block(x, scale=torch.randn(1, TOKENS)), x)
        with pytest.raises(InputError, match=r"argument 'other', \(3, 72\), has a size like .*: name it in tables"):
            block(x, other=torch.randn(3, TOKENS))
        with pytest.raises(
            InputError, match=r"argument 'x', \(2, 71, 8\), does not have the 72 tokens of canvas=\(3, "
        ):
            block(x[:, 1:])
        with pytest.raises(InputError, match=r"argument 'scale', \(72,\), does not have .* along axis 1"):
            block(x, torch.randn(TOKENS))
    with masks.in_tiles([block], CANVAS, TILE, "x", tables={"other": None}, result=1):
        other = torch.randn(3, TOKENS)
        assert block(x, other=other)[0] is other and torch.equal(block(x, other=other)[1], x)
    with pytest.raises(InputError, match="Block has no argument 'y'; there are x, scale, other"):
        with masks.in_tiles([block], CANVAS, TILE, "y"):
            pass
    with (
        pytest.raises(InputError, match="such as model.blocks, got a Linear"),
        masks.in_tiles(torch.nn.Linear(2, 2), (2, 4), (1, 2), "x"),
    ):
        pass
    with pytest.raises(InputError, match="a sequence of modules"):
        with masks.in_tiles([], CANVAS, TILE, "x"):
            pass
    with masks.in_tiles([block], CANVAS, TILE, "x", result=2, tables={"other": None}):
        with pytest.raises(InputError, match="result=2: Block returns tuple, no such tuple"):
            block(x, other=x)
    assert block(x) is x  # no hook is left


def test_blocks_out_of_turn_are_refused():
    first, last, x = Block(), Block(), torch.randn(1, TOKENS, 4)
    with masks.in_tiles([first, last], CANVAS, TILE, "x"):
        assert torch.equal(last(first(x)), x) and torch.equal(last(first(x)), x)
        for wrong in (lambda: last(x), lambda: first(first(x)), lambda: last(last(first(x)))):
            with pytest.raises(InputError, match="Block is called out of turn"):
                wrong()
            assert torch.equal(last(first(x)), x)
    with pytest.raises(KeyError):  # an error of the model's is the one that is seen
        with masks.in_tiles([first, last], CANVAS, TILE, "x"):
            first(x)
            raise KeyError
    with pytest.raises(InputError, match="a block is there twice"):
        with masks.in_tiles([first, first], CANVAS, TILE, "x"):
            pass


class Scaled(torch.nn.Module):
    """Blocks that scale tokens by a table, which is written in place between them."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Scale() for _ in range(3)])

    def forward(self, x, table):
        table = table * 1
        for block in self.blocks:
            x = block(x, table)
            table.mul_(2).add_(1)
        return x


class Scale(torch.nn.Module):
    def forward(self, x, table):
        return x * table


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_tables_that_are_written_between_blocks(mode):
    model, x, table = Scaled(), torch.randn(1, TOKENS, 4), torch.randn(TOKENS, 1)
    with mode():
        expected = model(x, table)
        with masks.in_tiles(model.blocks, CANVAS, TILE, "x", tables={"table": 0}):
            torch.testing.assert_close(model(x, table), expected)
            if mode is torch.no_grad:
                for strict in (False, True):
                    program = torch.export.export(model, (x, table), strict=strict)
                    torch.testing.assert_close(program.module()(x, table), expected)


def test_tables_that_are_not_written_are_moved_once():
    block = [Scale() for _ in range(3)]
    model, x, table = torch.nn.Module(), torch.randn(1, TOKENS, 4), torch.randn(TOKENS, 1)
    model.blocks = torch.nn.ModuleList(block)
    model.forward = lambda x, table: block[2](block[1](block[0](x, table), table), table)
    with torch.no_grad(), masks.in_tiles(model.blocks, CANVAS, TILE, "x", tables={"table": 0}):
        program = torch.export.export(model, (x, table), strict=False)
    assert sum("index_select" in str(node.target) for node in program.graph.nodes) == 3  # tokens, back, the table


def test_a_model_that_leaves_early_is_refused():
    blocks, x = [Block(), Block(), Scale()], torch.randn(1, TOKENS, 4)
    missed = r"block 2, Scale, the last one, has not returned .*\(block 1 was the last that was called\)"
    with pytest.raises(InputError, match=rf"in_tiles ends within a call of the model: {missed}"):
        with masks.in_tiles(blocks, CANVAS, TILE, "x"):
            blocks[1](blocks[0](x))
    with masks.in_tiles(blocks, CANVAS, TILE, "x"):
        blocks[1](blocks[0](x))
        with pytest.raises(InputError, match=rf"out of turn: it is the first block, and {missed}"):
            blocks[0](x)
        assert torch.equal(blocks[2](blocks[0](x), 2), 2 * x)  # one that skips a block gets its tokens back
