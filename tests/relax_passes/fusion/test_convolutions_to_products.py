"""Convolutions become products of gathered rows; what follows has its channels last; other convolutions stay."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

import stof_tvm
from relax_passes.fusion.convolutions.convolutions_to_products import ConvolutionsToProducts
from relax_passes.fusion.convolutions.rows import Window, row_length
from relax_passes.ir.bindings import WEIGHTS, Bindings, operator, shape_of
from relax_passes.ir.closed_expressions import ClosedExpressions
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import inputs_of, module_of, run, weight

op = relax.op


CONVOLUTIONS = {1: (op.nn.conv1d, torch.conv1d), 2: (op.nn.conv2d, torch.conv2d), 3: (op.nn.conv3d, torch.conv3d)}


def convolution(emit, x, w, **options):
    return emit(CONVOLUTIONS[len(shape_of(w)) - 2][0](x, w, **options))


def biased(emit, x, c_out, *kernel, bias=True, half=False, seed=0, **options):
    """As the frontend writes it; half precision is computed in float32."""
    channels = shape_of(x)[1] // options.get("groups", 1)
    w, b = weight(c_out, channels, *kernel, seed=seed), weight(c_out, seed=seed)
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


def rewritten(before, is_cuda=False) -> tvm.IRModule:
    """`before` after the pass, with the same results."""
    after = ConvolutionsToProducts(is_cuda)(before)
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


def stays(before, is_cuda=False):
    tvm.ir.assert_structural_equal(ConvolutionsToProducts(is_cuda)(before), before)


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
    "patches of a video": ((2, 3), (4, 6, 8), 16, (1, 2, 2), {"strides": [1, 2, 2]}),
    "patches of frames and a rest": ((1, 2), (5, 9, 7), 4, (2, 4, 3), {"strides": [2, 4, 3]}),
    "video": ((1, 2), (5, 6, 7), 4, (3, 2, 3), {"padding": [1, 0, 2, 1, 1, 0], "strides": [1, 2, 1]}),
}


GROUPED = {
    "four places of a row": ((2, 8), (37,), 16, (24,), {"groups": 2, "padding": [12, 12]}),
    "two places of a row, strided": ((1, 8), (41,), 16, (16,), {"groups": 2, "padding": [3, 0], "strides": [2]}),
    "one place of a row": ((2, 16), (19,), 32, (2,), {"groups": 4, "strides": [3]}),
    "few channels": ((1, 6), (20,), 24, (8,), {"groups": 3, "padding": [0, 2]}),
    "dilated": ((1, 16), (40,), 16, (16,), {"groups": 2, "dilation": [2], "padding": [1, 8]}),
}


@pytest.mark.parametrize("case", [*CASES.values(), *GROUPED.values()], ids=[*CASES, *GROUPED])
def test_agrees_with_pytorch(case):
    (n, c_in), lengths, c_out, kernel, options = case
    groups = options.get("groups", 1)
    w = weight(c_out, c_in // groups, *kernel)
    before = module((n, c_in, *lengths), lambda emit, x: convolution(emit, x, w, **options))
    after = ConvolutionsToProducts(is_cuda=groups > 1)(before)
    assert names(after).count("matmul") == groups and not any("conv" in name for name in names(after))
    (x,) = inputs_of(before)
    sides = options.get("padding", [0] * 2 * len(kernel))
    pads = [side for axis in reversed(range(len(kernel))) for side in (sides[axis], sides[axis + len(kernel)])]
    expected = CONVOLUTIONS[len(kernel)][1](
        torch.nn.functional.pad(torch.from_numpy(x), pads),
        torch.from_numpy(w.value.numpy()),
        stride=options.get("strides", 1),
        dilation=options.get("dilation", 1),
        groups=groups,
    )
    (out,) = run(after, x)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel, stride, padding, channels", [(7, 4, 3, 3), (7, 2, 3, 3), (4, 2, 1, 3), (5, 3, 0, 8)])
def test_overlapping_windows_of_images_build_on_cpus(kernel, stride, padding, channels):
    """ResNet's and SegFormer's stems: joined from slices their indices had hundreds of quotients, without end."""
    model = torch.nn.Conv2d(channels, 4, kernel, stride, padding).eval()
    x = torch.randn(1, channels, 20, 23, generator=torch.Generator().manual_seed(0))
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False)
    with torch.no_grad():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


def test_patches_of_transposed_videos_build_on_cpus():
    """VideoMAE's: frames before channels; most summands of the long index are 0."""

    class Patches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv3d(3, 8, (2, 16, 16), (2, 16, 16))

        def forward(self, x):
            return self.conv(x.permute(0, 2, 1, 3, 4)).flatten(2).transpose(1, 2)

    model, x = Patches().eval(), torch.randn(1, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False)
    with torch.no_grad():
        torch.testing.assert_close(engine(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kernel", "channels", "length"), [(7, 3, 160), (2, 3, 16), (3, 8, 80), (4, 4, 64), (5, 1, 32)]
)
def test_long_rows_begin_at_whole_sectors(kernel, channels, length):
    """A row of 147 elements has 160, so that its first byte is a multiple of 32; of short ones, of 16."""
    window = Window(32, kernel, 2, 1, 0, 0)
    assert row_length([window, window], channels) == length


def test_which_windows_are_read_at_places_of_tables():
    def found(lengths, c_out, kernel, is_cuda=False, **options):
        shape = (1, 3, *lengths)
        body = lambda emit, x: convolution(emit, x, weight(c_out, 3, *kernel), **options)
        return names(ConvolutionsToProducts(is_cuda)(module(shape, body)))

    assert found((20, 20), 4, (3, 3), strides=[2, 2]).count("take") == 2
    assert "take" not in found((20, 20), 4, (3, 3), is_cuda=True, strides=[2, 2])
    assert "take" not in found((20, 20), 4, (3, 3))  # no piece is wider than one element
    assert "take" not in found((20, 20), 4, (4, 4), strides=[4, 4])  # one piece
    assert "take" not in found((20,), 4, (5,), strides=[2])  # one axis


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
@pytest.mark.parametrize("kernel", [(4, 4), (1, 4, 4)], ids=["image", "video"])
def test_patches_as_rows_need_one_transposition(kernel, bias, half):
    def body(emit, x):
        out = biased(emit, x, 16, *kernel, bias=bias, half=half, strides=kernel)
        return emit(op.permute_dims(emit(op.reshape(out, (2, 16, 6))), [0, 2, 1]))

    shape = (2, 3, *(1,) * (len(kernel) - 2), 8, 12)
    after = rewritten(module(shape, body, "float16" if half else "float32"))
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


# -- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [False, True])
def test_positional_convolutions_are_a_product_for_each_group(half):
    """Wav2Vec2's: a kernel of even length, whose last result is dropped, a GELU, and the input is added."""

    def body(emit, x):
        turned = emit(op.permute_dims(x, [0, 2, 1]))
        h = biased(emit, turned, 32, 24, half=half, groups=4, padding=[12, 12])
        h = emit(op.nn.gelu(emit(op.strided_slice(h, [2], [0], [30], [1]))))
        return emit(op.add(x, emit(op.permute_dims(h, [0, 2, 1]))))

    after = rewritten(module((2, 30, 32), body, "float16" if half else "float32"), is_cuda=True)
    rows = ["strided_slice", "concat", "take", "reshape", "matmul", *["add"] * half, "reshape"]
    joined = ["concat", "strided_slice", *["add"] * (not half), "strided_slice", "nn.gelu", "add"]
    assert names(after) == rows * 4 + joined
    products = [value for value in Bindings(after["main"]).values.values() if operator(value) == "matmul"]
    assert [shape_of(operand) for operand in products[0].args] == [(2, 8, 27 * 8), (27 * 8, 32)]


def test_slices_of_channels_and_steps_have_the_channels_last():
    def body(emit, x):
        h = emit(op.strided_slice(biased(emit, x, 16, 3), [1, 2], [4, 1], [12, 20], [1, 3]))
        return emit(op.permute_dims(h, [0, 2, 1]))

    assert names(rewritten(module((2, 8, 24), body)))[-3:] == ["matmul", "add", "strided_slice"]


@pytest.mark.parametrize(
    "shape, weight_shape, groups",
    [
        ((1, 32, 9), (64, 1, 8), 32),
        ((1, 4, 9), (4, 2, 4), 2),
        ((1, 4, 9), (16, 2, 3), 2),
        ((1, 264, 9), (264, 8, 3), 33),
        ((1 << 12, 128, 1 << 7), (128, 64, 65), 2),
    ],
    ids=["two results a channel", "few results", "odd rows", "many groups", "large"],
)
def test_groups_that_do_not_pay_stay(shape, weight_shape, groups):
    stays(module(shape, lambda emit, x: convolution(emit, x, weight(*weight_shape), groups=groups)), is_cuda=True)


def test_groups_stay_on_cpus_and_in_images():
    options, x_shape, w_shape = {"groups": 2}, (1, 16, 9), (16, 8, 3)
    stays(module(x_shape, lambda emit, x: convolution(emit, x, weight(*w_shape), **options)))
    image = module((*x_shape, 9), lambda emit, x: convolution(emit, x, weight(*w_shape, 3), **options))
    stays(image, is_cuda=True)


# -- depthwise -----------------------------------------------------------------------------------------------------

# (n, c), (lengths), (kernel), options
DEPTHWISE = {
    "causal": ((2, 16), (19,), (3,), {"padding": [2, 0]}),
    "strided": ((1, 6), (20,), (4,), {"strides": [3], "padding": [1, 2]}),
    "image": ((2, 8), (7, 9), (3, 3), {"padding": [1, 1, 1, 1]}),
    "image, strided and dilated": (
        (1, 5),
        (11, 14),
        (3, 2),
        {"strides": [2, 1], "dilation": [1, 3], "padding": [2, 0, 1, 2]},
    ),
    "no padding": ((1, 4), (5, 5), (5, 5), {}),
    "video": ((1, 4), (3, 5, 4), (3, 3, 1), {"padding": [1, 1, 0, 1, 1, 0]}),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", DEPTHWISE.values(), ids=DEPTHWISE)
def test_depthwise_convolutions_are_sums_of_windows(case, half):
    """On a GPU: views, one product with the weight and one sum, which are a group; on a CPU they stay."""
    (n, c), lengths, kernel, options = case
    body = lambda emit, x: biased(emit, x, c, *kernel, half=half, groups=c, **options)
    before = module((n, c, *lengths), body, "float16" if half else "float32")
    found = names(rewritten(before, is_cuda=True))
    pad, casts = ["nn.pad"] * any(options.get("padding", [])), ["astype"] * half
    behind = ["permute_dims", "reshape"] if len(kernel) > 1 else ["permute_dims"]
    views = ["permute_dims", *pad, *["take"] * len(kernel)]
    assert found[: found.index("sum") + 1] == [*views, "multiply", *casts, "sum"]
    assert sorted(found[found.index("sum") + 1 :]) == sorted([*casts, "reshape", "add", *behind])
    stays(before)


def test_near_misses_of_depthwise_convolutions():
    """One channel is an ordinary product; no template sums float64; two results a channel stay, too (above)."""
    one = module((2, 1, 8), lambda emit, x: convolution(emit, x, weight(1, 1, 3), groups=1))
    assert "matmul" in names(rewritten(one, is_cuda=True))
    wide = relax.const(np.ones((4, 1, 3)), "float64")
    stays(module((2, 4, 8), lambda emit, x: convolution(emit, x, wide, groups=4), "float64"), is_cuda=True)


def test_a_depthwise_convolution_between_products_moves_nothing():
    """SegFormer's: tokens as an image, and back to tokens; LFM2's and Conformer's are of one axis."""

    def body(emit, x):
        image = emit(op.reshape(emit(op.permute_dims(x, [0, 2, 1])), (2, 8, 4, 6)))
        h = emit(op.nn.gelu(biased(emit, image, 8, 3, 3, groups=8, padding=[1, 1, 1, 1])))
        return emit(op.permute_dims(emit(op.reshape(h, (2, 8, 24))), [0, 2, 1]))

    after = names(rewritten(module((2, 24, 8), body), is_cuda=True))
    assert after[after.index("sum") :] == ["sum", "reshape", "add", "nn.gelu"]


# -- group norms ---------------------------------------------------------------------------------------------------


def normalized(emit, x, groups, half=False, eps=1e-5):
    """A group norm as the frontend writes it; half precision is computed in float32."""
    channels, rank = shape_of(x)[1], len(shape_of(x))
    x = emit(op.astype(x, "float32")) if half else x
    vectors = weight(channels, seed=7), weight(channels, seed=8)
    h = emit(op.nn.group_norm(x, *vectors, groups, 1, list(range(2, rank)), eps))
    return emit(op.astype(h, "float16")) if half else h


# (n, c_in), (lengths), c_out, (kernel), groups, options
NORMS = {
    "of each channel": ((2, 8), (29,), 16, (4,), 16, {"strides": [2]}),
    "of groups": ((2, 8), (29,), 16, (4,), 4, {}),
    "of all": ((1, 8), (9,), 8, (1,), 1, {"bias": False}),
    "long": ((1, 1), (4300,), 8, (3,), 8, {"bias": False}),
    "long, with a bias": ((1, 2), (4300,), 8, (3,), 2, {}),
    "long, of whole parts": ((1, 1), (4608,), 8, (1,), 8, {}),
    "image": ((2, 3), (8, 9), 6, (2, 2), 3, {}),
}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("case", NORMS.values(), ids=NORMS)
def test_group_norms_have_the_channels_last(case, half):
    (n, c_in), lengths, c_out, kernel, groups, options = case

    def body(emit, x):
        h = normalized(emit, biased(emit, x, c_out, *kernel, half=half, **options), groups, half)
        return emit(op.permute_dims(emit(op.nn.relu(h)), [0, *range(2, len(kernel) + 2), 1]))

    after = rewritten(module((n, c_in, *lengths), body, "float16" if half else "float32"), is_cuda=True)
    assert not any("norm" in name for name in names(after))
    assert names(after)[names(after).index("matmul") :].count("permute_dims") == 0


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_group_norms_agree_with_pytorch_far_from_zero(offset):
    def body(emit, x):
        h = emit(op.add(convolution(emit, x, weight(16, 8, 1)), relax.const(np.full((1, 16, 1), offset, "float32"))))
        return emit(op.permute_dims(normalized(emit, h, 16), [0, 2, 1]))

    before = module((1, 8, 5000), body)
    (x,) = inputs_of(before)
    (out,) = run(ConvolutionsToProducts(is_cuda=True)(before), x)
    h = torch.conv1d(torch.from_numpy(x).double(), torch.from_numpy(weight(16, 8, 1).value.numpy()).double()) + offset
    vectors = (torch.from_numpy(weight(16, seed=seed).value.numpy()).double() for seed in (7, 8))
    expected = torch.nn.functional.group_norm(h, 16, *vectors).transpose(1, 2)
    np.testing.assert_allclose(out, expected.numpy(), rtol=1e-4, atol=1e-4 + 3e-7 * offset)


def test_equal_elements_have_variance_zero():
    def body(emit, x):
        h = convolution(emit, emit(op.multiply(x, relax.const(0.0, "float32"))), weight(8, 8, 1))
        h = emit(op.add(h, relax.const(np.full((1, 8, 1), 54321.1, "float32"))))
        return emit(op.permute_dims(normalized(emit, h, 2), [0, 2, 1]))

    before = module((1, 8, 4100), body)
    (out,) = run(ConvolutionsToProducts(is_cuda=True)(before), *inputs_of(before))
    np.testing.assert_array_equal(out, np.broadcast_to(weight(8, seed=8).value.numpy(), out.shape))


def test_group_norms_stay_on_cpus_and_of_other_values():
    def body(emit, x):
        return normalized(emit, biased(emit, x, 8, 3), 4)

    assert names(rewritten(module((2, 8, 9), body)))[-2:] == ["permute_dims", "nn.group_norm"]
    stays(module((2, 8, 9), lambda emit, x: normalized(emit, x, 4)), is_cuda=True)


# -- what stays ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, weight_shape, options",
    [
        ((1, 4, 9), (4, 2, 3), {"groups": 2}),
        ((1, 4, 9), (4, 1, 3), {"groups": 4}),
        ((1, 9, 4), (4, 4, 3), {"data_layout": "NWC"}),
        ((1, 4, 9), (3, 4, 4), {"kernel_layout": "WIO"}),
        ((1, 4, 9, 9), (3, 3, 4, 4), {"kernel_layout": "HWIO"}),
        ((1, 4, 5, 6, 7), (4, 2, 1, 2, 2), {"groups": 2}),
        ((1, 4, 5, 6, 7), (2, 2, 1, 4, 4), {"kernel_layout": "DHWIO"}),
        ((1, 4, 64), (4, 4, 17), {}),
        ((1 << 20, 4, 1 << 9), (4, 4, 3), {}),
        ((0, 4, 9), (4, 4, 3), {}),
    ],
    ids=["groups", "depthwise", "NWC", "WIO", "HWIO", "groups of a video", "DHWIO", "many pieces", "large", "empty"],
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
