"""Convolutions become products of gathered rows; what follows has its channels last; other convolutions stay."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from relax_passes.fusion.convolutions_to_products import ConvolutionsToProducts
from relax_passes.ir.bindings import WEIGHTS, Bindings, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from tests.relax_passes.fusion.modules import inputs_of, module_of, run, weight

op = relax.op


def convolution(emit, x, w, **options):
    return emit((op.nn.conv1d if len(shape_of(w)) == 3 else op.nn.conv2d)(x, w, **options))


def biased(emit, x, c_out, *kernel, bias=True, half=False, seed=0, **options):
    """As the frontend writes it; half precision is computed in float32."""
    w, b = weight(c_out, shape_of(x)[1], *kernel, seed=seed), weight(c_out, seed=seed)
    if half:
        x = emit(op.astype(x, "float32"))
        w, b = (emit(op.astype(relax.const(v.value.numpy().astype("float16")), "float32")) for v in (w, b))
    out = convolution(emit, x, w, **options)
    if bias:
        out = emit(op.add(out, emit(op.reshape(b, (1, c_out, *(1 for _ in kernel))))))
    return emit(op.astype(out, "float16")) if half else out


def module(shape, body, dtype="float32"):
    """A module of one input, `body(emit, x)`."""
    x = relax.Var("x", relax.TensorType(shape, dtype))
    return module_of([x], lambda builder: body(builder.emit, x))


def rewritten(before) -> tvm.IRModule:
    """`before` after the pass, with the same results."""
    after = ConvolutionsToProducts()(before)
    dtype = before["main"].params[0].ty.dtype
    inputs = [x.astype(str(dtype)) for x in inputs_of(before)]
    tolerance = 1e-4 if dtype == "float32" else 2e-2
    for ours, theirs in zip(run(after, *inputs), run(before, *inputs), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)
    return after


def names(mod) -> list[str]:
    """The operators at run time, in order."""
    bindings = Bindings(mod["main"])
    closed = ClosedExpressions(bindings).closed_vars
    return [operator(value) for var, value in bindings.values.items() if var not in closed]


def stays(before):
    tvm.ir.assert_structural_equal(ConvolutionsToProducts()(before), before)


# (n, c_in), (lengths), c_out, (kernel), options
CASES = {
    "plain": ((2, 3), (11,), 5, (3,), {}),
    "one element": ((2, 3), (7,), 4, (1,), {}),
    "one element, strided": ((1, 3), (8,), 4, (1,), {"strides": [3]}),
    "padded": ((1, 8), (12,), 4, (3,), {"padding": [1, 1]}),
    "padded on one side, strided": ((2, 8), (13,), 4, (3,), {"padding": [2, 0], "strides": [2]}),
    "a last stride beyond the end": ((1, 4), (23,), 3, (5,), {"strides": [3]}),
    "stride beyond the kernel": ((1, 4), (17,), 3, (2,), {"strides": [5], "padding": [0, 1]}),
    "sound": ((1, 1), (64,), 6, (10,), {"strides": [5]}),
    "dilated": ((2, 3), (16,), 4, (3,), {"dilation": [2], "padding": [1, 3], "strides": [2]}),
    "image": ((2, 3), (9, 8), 5, (3, 2), {"padding": [1, 0, 2, 1]}),
    "image, strided": ((1, 2), (11, 14), 4, (7, 4), {"strides": [2, 3], "padding": [3, 2, 3, 2]}),
    "image, dilated": ((1, 2), (9, 10), 4, (2, 3), {"strides": [1, 2], "dilation": [3, 2]}),
    "patches": ((2, 3), (8, 12), 16, (4, 3), {"strides": [4, 3]}),
    "patches and a rest": ((1, 3), (9, 8), 4, (4, 4), {"strides": [4, 4]}),
    "overlapping patches": ((1, 1), (26, 36), 8, (16, 16), {"strides": [10, 10]}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_agrees_with_pytorch(case):
    (n, c_in), lengths, c_out, kernel, options = case
    w = weight(c_out, c_in, *kernel)
    before = module((n, c_in, *lengths), lambda emit, x: convolution(emit, x, w, **options))
    after = ConvolutionsToProducts()(before)
    assert names(after).count("matmul") == 1 and not any("conv" in name for name in names(after))
    (x,) = inputs_of(before)
    sides = options.get("padding", [0] * 2 * len(kernel))
    pads = [side for axis in reversed(range(len(kernel))) for side in (sides[axis], sides[axis + len(kernel)])]
    expected = (torch.conv1d if len(kernel) == 1 else torch.conv2d)(
        torch.nn.functional.pad(torch.from_numpy(x), pads),
        torch.from_numpy(w.value.numpy()),
        stride=options.get("strides", 1),
        dilation=options.get("dilation", 1),
    )
    (out,) = run(after, x)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-4)


# -- the channels' place -------------------------------------------------------------------------------------------


def stem(emit, x, half=False):
    """Whisper's: two convolutions with GELUs, then tokens as rows."""
    h = emit(op.nn.gelu(biased(emit, x, 16, 3, half=half, padding=[1, 1])))
    h = emit(op.nn.gelu(biased(emit, h, 8, 3, half=half, padding=[1, 1], strides=[2])))
    return emit(op.permute_dims(h, [0, 2, 1]))


def test_between_convolutions_nothing_is_transposed():
    after = rewritten(module((2, 8, 12), stem))
    first = ["reshape", "concat", *["strided_slice"] * 3, "concat", "reshape", "permute_dims", "reshape"]
    second = ["concat", "strided_slice", "reshape", "reshape", "strided_slice", "concat"]
    assert names(after) == [*first, "matmul", "add", "nn.gelu", *second, "matmul", "add", "nn.gelu"]


def test_casts_around_convolutions_vanish():
    after = rewritten(module((2, 8, 12), lambda emit, x: stem(emit, x, half=True), "float16"))
    values = Bindings(after["main"]).values.values()
    assert "astype" not in names(after)
    assert {str(value.ty.dtype) for value in values if operator(value) == "matmul"} == {"float16"}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_patches_as_rows_need_one_transposition(bias, half):
    def body(emit, x):
        out = biased(emit, x, 16, 4, 4, bias=bias, half=half, strides=[4, 4])
        return emit(op.permute_dims(emit(op.reshape(out, (2, 16, 6))), [0, 2, 1]))

    after = rewritten(module((2, 3, 8, 12), body, "float16" if half else "float32"))
    assert names(after)[-1 - bias :] == ["matmul", "add"][: 1 + bias]
    assert {"astype", "concat", "strided_slice"}.isdisjoint(names(after)[:-2])


def test_an_input_whose_channels_were_last_is_not_transposed():
    def body(emit, x):
        out = biased(emit, emit(op.permute_dims(x, [0, 2, 1])), 4, 3)
        return emit(op.permute_dims(out, [0, 2, 1]))

    assert "permute_dims" not in names(rewritten(module((2, 9, 8), body)))


def test_readers_of_other_kinds_take_the_channels_second():
    def body(emit, x):
        h = biased(emit, x, 8, 3)
        return emit(relax.Tuple([emit(op.max(h, axis=[2])), emit(op.permute_dims(emit(op.nn.relu(h)), [0, 2, 1]))]))

    after = rewritten(module((2, 8, 9), body))
    assert names(after)[-5:] == ["add", "permute_dims", "max", "nn.relu", ""]


def test_other_transpositions_are_composed():
    def body(emit, x):
        out = biased(emit, x, 5, 2, 2)
        return emit(op.permute_dims(out, [2, 3, 1, 0]))

    after = rewritten(module((3, 2, 4, 6), body))
    assert names(after)[-4:] == ["matmul", "add", "reshape", "permute_dims"]


def test_sums_of_convolutions_and_constants_of_channels_have_the_channels_last():
    def body(emit, x):
        h = emit(op.add(biased(emit, x, 4, 3, padding=[1, 1]), biased(emit, x, 4, 1, seed=1)))
        h = emit(op.multiply(weight(4, 1), emit(op.divide(h, relax.const(2.0, "float32")))))
        return emit(op.permute_dims(h, [0, 2, 1]))

    assert names(rewritten(module((2, 8, 9), body)))[-3:] == ["add", "divide", "multiply"]


def test_numbers_keep_the_channels_last_in_images():
    def body(emit, x):
        h = emit(op.clip(biased(emit, x, 4, 2, 2), -0.5, 0.5))
        return emit(op.permute_dims(emit(op.multiply(h, weight(1, 1, 1, 1))), [0, 2, 3, 1]))

    assert names(rewritten(module((2, 8, 4, 5), body)))[-5:] == ["matmul", "add", "clip", "multiply", "reshape"]


@pytest.mark.parametrize("other", [(1, 1, 9), (2, 4, 9), (9,)], ids=str)
def test_operands_that_would_be_transposed_keep_the_channels_second(other):
    def body(emit, x):
        return emit(op.add(biased(emit, x, 4, 1), weight(*other)))

    assert names(rewritten(module((2, 8, 9), body)))[-2:] == ["permute_dims", "add"]


def test_rows_are_padded_to_sixteen_bytes_of_half_precision():
    after = ConvolutionsToProducts()(module((1, 1, 40), lambda emit, x: biased(emit, x, 8, 10, strides=[5])))
    (product,) = (value for value in Bindings(after["main"]).values.values() if operator(value) == "matmul")
    assert [shape_of(operand) for operand in product.args] == [(1, 7, 16), (16, 8)]


# -- what stays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, weight_shape, options",
    [
        ((1, 4, 9), (4, 2, 3), {"groups": 2}),
        ((1, 4, 9), (4, 1, 3), {"groups": 4}),
        ((1, 9, 4), (4, 4, 3), {"data_layout": "NWC"}),
        ((1, 4, 9), (3, 4, 4), {"kernel_layout": "WIO"}),
        ((1, 4, 9, 9), (3, 3, 4, 4), {"kernel_layout": "HWIO"}),
        ((1, 4, 64), (4, 4, 17), {}),
        ((1 << 20, 4, 1 << 9), (4, 4, 3), {}),
        ((0, 4, 9), (4, 4, 3), {}),
    ],
    ids=["groups", "depthwise", "NWC", "WIO", "HWIO", "many pieces", "large", "empty"],
)
def test_other_convolutions_stay(shape, weight_shape, options):
    stays(module(shape, lambda emit, x: convolution(emit, x, weight(*weight_shape), **options)))


def test_transposed_convolutions_stay():
    stays(module((1, 4, 9), lambda emit, x: emit(op.nn.conv1d_transpose(x, weight(4, 4, 3)))))


def test_symbolic_lengths_stay():
    length = tvm.tirx.Var("length", "int64")
    stays(module((1, 4, length), lambda emit, x: convolution(emit, x, weight(4, 4, 3))))


def test_weights_that_a_call_gives_stay_and_parameters_that_stand_for_weights_do_not():
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in (("x", (1, 4, 9)), ("w", (4, 4, 3))))
    before = module_of([x, w], lambda builder: convolution(builder.emit, x, w))
    stays(before)
    bound = tvm.IRModule({"main": before["main"].with_attr(WEIGHTS, ["w"])})
    assert "matmul" in names(rewritten(bound))


@pytest.mark.parametrize("wide", ["weight", "bias", "result", "product"])
def test_half_precision_with_anything_wider_stays(wide):
    def body(emit, x):
        w, b = weight(8, 4, 3), weight(8)
        if wide != "weight":
            w = emit(op.astype(relax.const(w.value.numpy().astype("float16")), "float32"))
        if wide != "bias":
            b = emit(op.astype(relax.const(b.value.numpy().astype("float16")), "float32"))
        product = convolution(emit, emit(op.astype(x, "float32")), w)
        out = emit(op.add(product, emit(op.reshape(b, (1, 8, 1)))))
        narrow = emit(op.astype(out, "float16"))
        results = {"result": [narrow, out], "product": [narrow, product]}
        return emit(relax.Tuple(results.get(wide, [narrow, narrow])))

    stays(module((1, 4, 9), body, "float16"))
