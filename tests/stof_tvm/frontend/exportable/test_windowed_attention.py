"""Longformer and LED of transformers: their windows as masks, padded rows too; NaN where what was fixed changes."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import ExportError
from stof_tvm.frontend.export import export_model
from stof_tvm.frontend.exportable.windowed_attention import exportable_windows, global_tokens, windowed_layers
from tests.models.quick_llvm import QUICK_LLVM

transformers = pytest.importorskip("transformers")

LENGTH = 19  # no multiple of the window: the models pad it
SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def longformer():
    torch.manual_seed(0)
    config = transformers.LongformerConfig(**SIZES, attention_window=4, max_position_embeddings=64)
    return transformers.LongformerModel(config, add_pooling_layer=False).eval()


def inputs(*names) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    padding, tokens = torch.ones(2, LENGTH, dtype=torch.int64), torch.zeros(2, LENGTH, dtype=torch.int64)
    padding[1, 13:] = 0
    tokens[:, 0] = tokens[1, 5] = 1
    given = {"attention_mask": padding, "global_attention_mask": tokens}
    ids = torch.randint(1, 64, (2, LENGTH), generator=generator)
    return {"input_ids": ids, **{name: given[name] for name in names}}


@pytest.mark.parametrize("names", [(), ("attention_mask",), ("attention_mask", "global_attention_mask")])
def test_results_are_pytorchs(longformer, names):
    call = inputs(*names)
    engine = stof_tvm.build(longformer, QUICK_LLVM, call, strict=True, verify=False)
    with torch.no_grad():
        torch.testing.assert_close(engine(**call)[0], longformer(**call)[0], rtol=0, atol=3e-6)
    sites = [site.site for site in engine.report().sites]
    assert sites[0] == "encoder.layer.0.attention.self"
    assert len(sites) == (2 if "global_attention_mask" in names else 1)
    assert max(site.density for site in engine.report().sites) < 0.35
    (told,) = engine.report().notes
    assert ("of 1 or 2 tokens in each" if "global_attention_mask" in names else "of no token") in told
    call["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.int64) if names else None
    if names == ("attention_mask",):  # a 2 asks for global attention, too
        call["attention_mask"][0, 0] = 2
        assert engine(**call)[0].isnan().all()
    if "global_attention_mask" in names:
        with torch.no_grad():
            torch.testing.assert_close(engine(**call)[0], longformer(**call)[0], rtol=0, atol=3e-6)
        call["global_attention_mask"] = call["global_attention_mask"].roll(1, 1)
        assert engine(**call)[0].isnan().all()


@pytest.mark.slow
def test_a_given_mask_reaches_the_windows(longformer):
    call, path = inputs(), "encoder.layer.*.attention.self"
    engine = stof_tvm.build(longformer, QUICK_LLVM, call, {path: masks.causal()}, verify=False)
    changed = {"input_ids": call["input_ids"].clone()}
    changed["input_ids"][:, -1] += 1
    torch.testing.assert_close(engine(**changed)[0][:, :-1], engine(**call)[0][:, :-1], rtol=0, atol=0)


@pytest.mark.slow
def test_led_and_its_decoder():
    torch.manual_seed(0)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 64))}
    heads = {f"{side}_attention_heads": 2 for side in ("encoder", "decoder")}
    config = transformers.LEDConfig(vocab_size=64, d_model=32, **sides, **heads, attention_window=4, use_cache=False)
    model = transformers.LEDModel(config).eval()
    call = inputs("attention_mask", "global_attention_mask")
    call["decoder_input_ids"] = call["input_ids"][:, :5]
    engine = stof_tvm.build(model, QUICK_LLVM, call, strict=True, verify=False)
    with torch.no_grad():
        torch.testing.assert_close(
            engine(**call).last_hidden_state, model(**call).last_hidden_state, rtol=0, atol=3e-6
        )  # fmt: skip


def test_only_exports_are_changed(longformer):
    call = inputs("attention_mask", "global_attention_mask")
    tokens = global_tokens(longformer, (), call)
    assert tokens.tolist() == torch.nn.functional.pad(call["global_attention_mask"] > 0, (0, 1)).tolist()
    with torch.no_grad():
        expected = longformer(**call)[0]
        with exportable_windows(longformer, tokens):
            torch.testing.assert_close(longformer(**call)[0], expected, rtol=0, atol=0)
    assert all("forward" not in vars(layer) for layer in windowed_layers(longformer))
    assert not any(layer._forward_pre_hooks for layer in windowed_layers(longformer))


def test_a_class_that_computes_something_else_is_left(longformer):
    layer = windowed_layers(longformer)[0]

    class Other(type(layer)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    before = type(layer)
    layer.__class__ = Other
    try:
        assert layer not in windowed_layers(longformer)
        with pytest.raises(ExportError, match="data-dependent"):
            export_model(longformer, (), inputs(), global_tokens(longformer, (), inputs()))
    finally:
        layer.__class__ = before


def test_weights_that_are_asked_for_are_refused(longformer):
    with pytest.raises(ExportError):
        stof_tvm.build(longformer, QUICK_LLVM, {**inputs(), "output_attentions": True}, verify=False)


class Scaled(torch.nn.Module):
    """A number that is read, and one that is only checked."""

    def __init__(self, is_read):
        super().__init__()
        self.is_read = is_read

    def forward(self, x):
        number = x.any().item()
        return x * number if self.is_read else x * 2


def test_numbers_that_only_assertions_read_are_dropped():
    numbers = lambda program: program.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)
    assert not numbers(export_model(Scaled(False), (torch.ones(3),), {}))
    assert numbers(export_model(Scaled(True), (torch.ones(3),), {}))
