"""Slices and assignments to slices, diagonals, strides and windows: PyTorch's numbers, also after loops are fused."""

import pytest
import torch
from tvm import relax

import stof_tvm
from stof_tvm.frontend import import_model
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.frontend.batches import Functions, errors, message
from tests.stof_tvm.frontend.operators.fused_loops import accesses

SLICES = (
    *(slice(0, None, 2), slice(1, None, 2), slice(None, None, 3), slice(2, None, 3), slice(1, 7, 2), slice(0, 9, 5)),
    *(slice(1, 3), slice(-2, None), slice(-5, -1, 2), slice(2, 100, 4), slice(-100, 2), slice(3, 3), slice(8, 2)),
)


def assigned(dim, part):
    def function(x, y):
        out, place = x.clone(), (slice(None),) * dim + (part,)
        out[place] = 2 * y[tuple(slice(n) for n in out[place].shape)]
        return out

    return function


def with_casts(x, y):
    whole = torch.zeros(4, 6, 9, dtype=torch.int64)
    whole[..., ::2] = y[..., :5] * 9
    half = torch.zeros(4, 6, 9, dtype=torch.float16)
    half[:, 1::2] = x[:, :3]
    number = x.clone()
    number[:, ::2] = 7
    number[1:3, :, 0] = y[0, :, 0]
    flags = x > 0
    flags[:, ::3] = True
    return whole, half, number, flags


def through_views(x, y):
    out = x.clone()
    rows = out[1:][:, 2]
    rows[:, 0] = 5
    out[1:].transpose(1, 2)[0, ::3] += 1
    out[::2, 1::2, ::2] *= 2
    out[:, 1] = y[:, 2]
    out.view(-1)[3:40:7] = y.flatten()[:6]
    out[0].diagonal().zero_()
    out.select(1, -1).fill_(2.0)
    return out


WRITES = {f"{n % 3} {part}": assigned(n % 3, part) for n, part in enumerate(SLICES)} | {
    "casts": with_casts,
    "views": through_views,
}


def reversed_pairs(x, y):
    """A rotary embedding of some columns, halves exchanged by flip, of repeated ones."""
    pairs = x[:, :3].repeat_interleave(2, 2)
    turned = pairs[..., :2] * y[:, :3, :2] + pairs[..., :2].flip(-1) * y[:, :3, 2:4]
    return torch.cat([turned, pairs[..., 2:]], -1)


READS = {
    "reversed pairs": lambda x, y: (reversed_pairs(x, y), reversed_pairs(x[:1, :, :8], y[:1])),
    "slices": lambda x, y: (x[..., 1:100:3], x[-3:-1], x[:, -100:2], x[..., ::4], (x > 0)[:, 1::2]),
    "slice_scatter": lambda x, y: torch.slice_scatter(x, y[:, :2], 1, 1, 6, 3),
    "select_scatter": lambda x, y: torch.select_scatter(x, y[:, 0], 1, -2),
    "diagonal": lambda x, y: (x.diagonal(1, 1, 2), x.diagonal(-2, 0, 2), x.diagonal(0, 2, 0)),
    "diagonal_scatter": lambda x, y: torch.diagonal_scatter(x, y[:, :, 0], 0, 1, 2),
    "as_strided": lambda x, y: x.as_strided((2, 3), (1, 2), 4),
    "as_strided_scatter": lambda x, y: torch.as_strided_scatter(x, y[0, :2, :3], (2, 3), (1, 2)),
    "unfold": lambda x, y: (x.unfold(1, 3, 2), x.unfold(-1, 4, 1)),
    "F.unfold": lambda x, y: torch.nn.functional.unfold(x[None], 3, padding=1, stride=2),
    "F.fold": lambda x, y: torch.nn.functional.fold(y.reshape(1, 24, 9)[:, :, :8], (3, 5), 2),
    "flip": lambda x, y: (x.flip(0, 2), x.rot90(1, (0, 2))),
    "flip of joined heads": lambda x, y: (
        x.unflatten(2, (3, 3)).transpose(1, 2).flatten(1, 2).unflatten(1, (6, 3)).flatten(2).flip(1),
        x.unflatten(2, (3, 3)).permute(2, 1, 0, 3).flatten(2).flip(1),
        x.flatten(1).unsqueeze(-1).flatten(2).transpose(1, 2)[..., :2].flip(-1) * y[0, 0, :2],
    ),
    "flips of parts": lambda x, y: x[:, :, :8].flip(2).unflatten(1, (2, 3)).flatten(0, 1).flatten(0, 2).flip(0),
    "roll": lambda x, y: (x.roll(1, 2), x.roll((-2, 11), (0, 1)), x.roll(5)),
    "triangle": lambda x, y: (x.tril(1), x.triu(-1), x[0][tuple(torch.tril_indices(5, 4))]),
    "diag": lambda x, y: (torch.diag(x[0, 0]), torch.diag_embed(x, 1), torch.block_diag(x[0], y[0])),
    "pad": lambda x, y: tuple(torch.nn.functional.pad(x, (1, 2), m) for m in ("reflect", "replicate", "circular")),
    "pad constant": lambda x, y: tuple(torch.nn.functional.pad(x, p, value=1.5) for p in ((1, -1, 2, 0), (-2, -1))),
    "repeated": lambda x, y: (
        x.repeat(2, 1, 1),
        x.tile(2, 1),
        x.repeat_interleave(2, 1),
        x[:, None].expand(4, 2, 6, 9),
    ),
    "products": lambda x, y: (torch.kron(x[0], y[0]), torch.tensordot(x, y, ([1, 2], [1, 2]))),
    "grids": lambda x, y: (torch.meshgrid(x[0, 0], x[0, :, 0], indexing="xy"), torch.cartesian_prod(x[0, 0], y[0, 0])),
    "sums of ints": lambda x, y: ((x * 9).long().cumsum(0), (x * 2).int().cumprod(1)),
}


@pytest.mark.parametrize("functions", [WRITES, READS], ids=["writes", "reads"])
def test_numbers(functions):
    torch.manual_seed(0)
    found = errors(functions, (torch.randn(4, 6, 9), torch.randn(4, 6, 9)))
    assert {name: error for name, error in found.items() if error > 1e-5} == {}


def interleaved(x, y):
    """Rotary embedding as diffusers spells it, and a part of the result."""
    out = torch.empty_like(x)
    out[..., 0::2] = y[..., :12] * 2
    out[..., 1::2] = y[..., 12:] + 1
    return out, torch.slice_scatter(x, y[..., :8], -1, 2, None, 3), torch.slice_scatter(x, y[:2], 0, 1, None, 2)


def test_indices_stay_inside_after_all_loops_are_fused():
    inputs = torch.randn(4, 24), torch.randn(4, 24)
    assert accesses(import_model(Functions([interleaved]), inputs).mod) > 1000


def test_tvm_s_own_slice_scatter_reads_outside_after_all_loops_are_fused():
    """What the converter is for: once TVM is right here, its operator may be taken."""
    x, part = (relax.Var(name, relax.TensorType((4, n), "float32")) for name, n in (("x", 24), ("part", 12)))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, part]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.slice_scatter(x, part, 0, 24, 2, axis=1))
        builder.emit_func_output(out)
    with pytest.raises(IndexError, match="element -12 of 48"):
        accesses(builder.get())


class Rotary(torch.nn.Module):
    """As diffusers' Wan transformer spells it; six elements are fewer than a vector has, so that loops are fused."""

    def forward(self, x, angle):
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = angle.cos()[..., 0::2], angle.sin()[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = even * cos - odd * sin
        out[..., 1::2] = even * sin + odd * cos
        return out.type_as(x).transpose(1, 2)


def test_rotary_by_strided_assignment():
    torch.manual_seed(0)
    model, inputs = Rotary(), (torch.randn(1, 64, 2, 6), torch.randn(1, 64, 1, 6))
    engine = stof_tvm.build(model, QUICK_LLVM, inputs)
    torch.testing.assert_close(engine(*inputs), model(*inputs))


def test_as_strided_of_a_view_is_refused():
    x = torch.randn(4, 6)
    assert "depends on where its elements lie" in message(lambda x: x[1:].as_strided((2, 2), (1, 1)), x)


def test_assignment_to_an_input_makes_it_a_state():
    def function(x):
        x[:, ::2] = 0
        return x + 1

    (state,) = import_model(Functions([function]), (torch.randn(4, 6),)).states
    assert state.initial is None and state.new != state.node
