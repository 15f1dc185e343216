"""Views against torch's, and models with one projection for q, k and v: nothing is cut out of it before the kernel."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn
from tvm import relax

from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.rewrite_masked_attention import SITES, RewriteMaskedAttention
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.strided_views import Strided, find_view
from stof_tvm import masks
from stof_tvm.frontend import import_model
from tir_kernels.attention.problem import View
from tir_kernels.target import parse_target

B, S, H, D = 2, 40, 4, 8


def elements(view: Strided) -> np.ndarray:
    """The elements of the base, in the view's shape."""
    index = np.array(view.offset)
    for dim in view.dims:
        along = np.array(0)
        for n, stride in dim:
            along = (along[..., None] + np.arange(n) * stride).reshape(-1)
        index = index[..., None] + along.reshape(-1)
    return index


@pytest.mark.parametrize("seed", range(40))
def test_chains_of_views_read_what_torchs_do(seed):
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.choice([1, 2, 3, 4, 6], size=4)]
    expected, view = torch.arange(math.prod(shape)).reshape(shape), Strided.contiguous(shape)
    for _ in range(6):
        kind = rng.integers(3)
        if kind == 0:
            axes = rng.permutation(expected.dim()).tolist()
            expected, following = expected.permute(axes), view.permute(axes)
        elif kind == 1:
            size = expected.numel()
            first = int(rng.choice([n for n in (1, 2, 3, 4, 6) if size % n == 0]))
            shape = [first, size // first, 1]
            expected, following = expected.reshape(shape), view.reshape(shape)
        else:
            axis = int(rng.integers(expected.dim()))
            length = int(rng.integers(1, expected.shape[axis] + 1))
            start = int(rng.integers(expected.shape[axis] - length + 1))
            expected, following = expected.narrow(axis, start, length), view.narrow(axis, start, length)
        if following is None:
            assert kind != 0, "a transpose is always a view"
            view = Strided.contiguous(expected.shape)
            expected = torch.arange(expected.numel()).reshape(expected.shape)
        else:
            view = following
        np.testing.assert_array_equal(elements(view).reshape(expected.shape), expected.numpy())


def test_dimensions_that_were_joined_and_parted_again():
    """As nn.MultiheadAttention does with batch and heads of a packed projection."""
    view = Strided.contiguous((S, B, 3, H * D)).narrow(2, 1, 1).drop(2).reshape((S, B * H, D))
    assert view.strides() is None
    again = view.permute([1, 0, 2]).reshape((B, H, S, D))
    assert again.strides() == [3 * H * D, D, B * 3 * H * D, 1] and again.offset == H * D


def found(build, multiple=1):
    """The view that `find_view` sees in what `build` makes of x, (B, S, 3 * H * D), and its base if that is not x."""
    x = relax.Var("x", relax.TensorType((B, S, 3 * H * D), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(build(builder.emit, x))
        builder.emit_func_output(out)
    function = builder.finalize()["main"]
    result = find_view(Bindings(function), function.body.body, multiple)
    if result is None or result[0].same_as(function.params[0]):
        return result and result[1]
    return result[1], operator(Bindings(function).value(result[0]))


def heads_of(emit, x):
    return emit(relax.op.permute_dims(emit(relax.op.reshape(x, (B, S, -1, D))), [0, 2, 1, 3]))


def test_slices_with_steps_and_from_the_end():
    third = lambda emit, x: emit(relax.op.strided_slice(x, [2], [-H * D], [3 * H * D]))
    assert found(lambda emit, x: heads_of(emit, third(emit, x))) == View(B * S * 96, 64, S * 96, D, 96)
    every_other = lambda emit, x: emit(relax.op.strided_slice(x, [1], [1], [S], [2]))
    heads = lambda emit, x: emit(
        relax.op.permute_dims(emit(relax.op.reshape(every_other(emit, x), (B, 20, 12, D))), [0, 2, 1, 3])
    )
    assert found(heads) == View(B * S * 96, 96, S * 96, D, 192)


def test_a_view_that_rows_of_16_bytes_do_not_fit_is_cut_out_first():
    shifted = lambda emit, x: heads_of(emit, emit(relax.op.strided_slice(x, [2], [4], [4 + H * D])))
    assert found(shifted) == View(B * S * 96, 4, S * 96, D, 96)
    assert found(shifted, multiple=8) == (View(B * S * H * D, 0, S * H * D, D, H * D), "strided_slice")


@pytest.mark.parametrize("name", ["arithmetic", "elements of a head apart"])
def test_what_is_no_view_is_left_alone(name):
    if name == "arithmetic":
        assert found(lambda emit, x: emit(relax.op.exp(heads_of(emit, emit(relax.op.exp(x))))), 1) is None
    else:
        split = lambda emit, x: emit(relax.op.permute_dims(emit(relax.op.reshape(x, (B, S, 12, D))), [0, 2, 3, 1]))
        assert found(split) is None


# -- models -----------------------------------------------------------------------------------------------------------


class Gpt2Style(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(H * D, 3 * H * D)

    def forward(self, x):
        q, k, v = (y.view(B, S, H, D).transpose(1, 2) for y in self.qkv(x).split(H * D, dim=2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, H * D)


class TimmStyle(Gpt2Style):
    def forward(self, x):
        q, k, v = self.qkv(x).reshape(B, S, 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, S, H * D)


class Grouped(nn.Module):
    """Four query heads and two key/value heads in one projection."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(H * D, (H + 4) * D)

    def forward(self, x):
        q, k, v = self.qkv(x).view(B, S, H + 4, D).transpose(1, 2).split([H, 2, 2], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(B, S, H * D)


class TorchMultihead(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(H * D, H, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("model", [Gpt2Style, TimmStyle, Grouped, TorchMultihead])
@pytest.mark.parametrize("target", ["llvm", "cuda -arch=sm_80"])
def test_a_packed_projection_is_read_in_place(model, target, compile_model):
    torch.manual_seed(0)
    passes = [
        CanonicalizeAttention(),
        FoldMasks(),
        RewriteMaskedAttention(parse_target(target), lambda site: masks.causal() if site.causal else None),
        relax.transform.DeadCodeElimination(),
    ]
    x = torch.randn(B, S, H * D)
    if target.startswith("cuda"):
        mod = tvm.transform.Sequential(passes)(import_model(model().eval().half(), (x.half(),), {}).mod)
    else:
        compiled = compile_model(model(), (x,), passes=passes)
        mod = compiled.mod
        assert compiled.error(0) < 1e-5
    (site,) = json.loads(mod.attrs[SITES])
    assert site["rewritten"] and all(layout.startswith("view") for layout in site["layouts"][:3])
    assert site["layouts"][3] == ("sbhd" if model is TorchMultihead else "bshd")
    bindings = Bindings(mod["main"])
    names = [operator(value) for value in bindings.values.values()]
    (call,) = (value for value in bindings.values.values() if operator(value) == "call_tir")
    q, k, v = list(call.args[1])[:3]
    assert q.same_as(k) and k.same_as(v) and operator(bindings.value(q)) == "reshape"
    assert not {"split", "strided_slice", "take", "squeeze"} & set(names)
    weights = 2 if model is TorchMultihead else 1
    inputs = 2 if model is TorchMultihead else 0  # batch_first: x and the result are transposed, not q, k and v
    assert names.count("permute_dims") == weights + inputs
