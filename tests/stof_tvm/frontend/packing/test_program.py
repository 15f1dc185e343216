"""Packed programs compute, in PyTorch, what the model computes for each sequence alone, or are refused by name."""

import pytest
import torch
from torch import nn

from stof_tvm import masks
from stof_tvm.errors import ExportError, InputError, UnsupportedError
from stof_tvm.frontend.packing.batched import batched_of_module
from stof_tvm.frontend.packing.program import pack
from tests.stof_tvm.frontend.packing.modules import LONGEST, REFUSED, SEQUENCES, TOKENS, WIDTH, Padded, keys, sdpa
from tests.stof_tvm.frontend.packing.running import run_packed

LENGTHS = [5, LONGEST, 1, 3]


def packed(model, padding=None, tokens=32):
    example = torch.randn(3, LONGEST, WIDTH), torch.ones(3, LONGEST, dtype=torch.int64)
    batched = batched_of_module(model, example, {}, padding)
    return batched, pack(batched, batched.own_masks(), tokens, 8)


def check(f, lengths=LENGTHS):
    model = Padded(f).eval()
    batched, program = packed(model)
    torch.manual_seed(1)
    rows = [torch.randn(1, n, WIDTH) for n in lengths]
    found = run_packed(program, batched, {"x": rows}, lengths)
    for (got,), row in zip(found, rows, strict=True):
        with torch.no_grad():
            alone = model(row, torch.ones(row.shape[:2], dtype=torch.int64))
        torch.testing.assert_close(got, alone, rtol=2e-5, atol=2e-5)
    return program


@pytest.mark.parametrize("name", TOKENS)
def test_of_tokens(name):
    check(TOKENS[name])


@pytest.mark.parametrize("name", SEQUENCES)
def test_of_sequences(name):
    assert check(SEQUENCES[name]).depends_on_sequences


def test_inputs_that_are_no_sequences():
    """Channels of images are taken for tokens, which the model does not compute."""
    images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Flatten(2))
    told = r"channels(.|\n)*context_parallel takes an input's first .* batch and the second, 3 here, as tokens"
    with pytest.raises(ExportError, match=told):
        batched_of_module(images, (torch.zeros(2, 3, 16, 16),), {}, None, all_lengths=False)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    f, told = REFUSED[name]
    with pytest.raises(UnsupportedError, match=told):
        packed(Padded(f).eval())


def test_own_masks_have_names():
    def of(name):
        (mask,) = check(TOKENS[name]).masks.values()
        return mask

    assert of("a whole attention") is None
    assert of("a causal one") == of("a causal buffer") == of("a triangle") == of("chosen") == masks.causal()
    assert of("a window") == masks.sliding_window(2)
    assert "table" in repr(of("gaps"))


def test_a_bias_stays_and_a_mask_does_not():
    program = check(TOKENS["distances"]).program
    (attention,) = program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    )
    assert attention.args[3] is not None
    program = check(TOKENS["a window"]).program
    assert "stof_place" not in [node.name for node in program.graph.find_nodes(op="placeholder")]


def test_paths_are_the_importers():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Padded(lambda m, x, mask: sdpa(m, sdpa(m, x, keys(mask)), None, is_causal=True))

        def forward(self, x, attention_mask):
            return self.inner(x, attention_mask)

    _, program = packed(Two().eval())
    assert program.masks == {"inner": None, "inner#1": masks.causal()}


def test_states_are_refused():
    def counted(m, x, mask):
        m.calls.add_(1)
        return x * 2

    with pytest.raises(UnsupportedError, match="updates 'calls', a state"):
        packed(Padded(counted).eval())


def test_the_padding_mask_must_be_an_input():
    with pytest.raises(InputError, match="without_padding='mask' names no tensor among the example inputs"):
        packed(Padded(TOKENS["features"]).eval(), padding="mask")


def test_a_length_at_which_the_model_is_another():
    with pytest.raises(UnsupportedError, match="does not compute sequences of 12 tokens as it does others"):
        packed(Padded(lambda m, x, mask: x * 2 if x.shape[1] == LONGEST else x).eval())


def test_a_length_that_the_model_fixes():
    with pytest.raises(UnsupportedError, match="the model fixes dimension 1 of x to 6"):
        packed(Padded(lambda m, x, mask: x * torch.ones(x.shape[1], 1) if x.shape[1] == 6 else x).eval())
