"""Convolutions that cut an image into patches become products; all others stay."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.fusion.patches_to_product import PatchesToProduct
from tests.relax_passes.fusion.modules import inputs_of, module_of, run, weight

op = relax.op


def patches(emit, x, kernel=(4, 3), rows=8, bias=True, wide=None, turned=True, **options):
    """As vision transformers write it."""
    w, b = weight(16, 3, *kernel), weight(16)
    if wide:
        w, b = (emit(op.astype(relax.const(v.value.numpy().astype("float16")), wide)) for v in (w, b))
        x = emit(op.astype(x, wide))
    out = emit(op.nn.conv2d(x, w, **{"strides": kernel, **options}))
    if bias:
        out = emit(op.add(out, emit(op.reshape(b, (1, 16, 1, 1)))))
    if wide:
        out = emit(op.astype(out, "float16"))
    out = emit(op.reshape(out, (int(x.ty.shape[0]), 16, rows)))
    return emit(op.permute_dims(out, [0, 2, 1])) if turned else out


def module(shape=(2, 3, 8, 12), dtype="float32", **options):
    x = relax.Var("x", relax.TensorType(shape, dtype))
    return module_of([x], lambda builder: patches(builder.emit, x, **options))


def names(mod) -> set[str]:
    values = [b.value for block in mod["main"].body.blocks for b in block.bindings]
    return {v.op.name.removeprefix("relax.") for v in values if isinstance(v, relax.Call)}


@pytest.mark.parametrize("bias", [True, False])
def test_patches_become_a_product(bias):
    before = module(bias=bias)
    after = PatchesToProduct()(before)
    assert "matmul" in names(after) and "nn.conv2d" not in names(after)
    inputs = inputs_of(before)
    np.testing.assert_allclose(run(after, *inputs), run(before, *inputs), rtol=1e-4, atol=1e-5)


def test_casts_around_the_convolution_vanish():
    before = module(dtype="float16", wide="float32")
    after = PatchesToProduct()(before)
    assert "nn.conv2d" not in names(after)
    products = [b.value for b in after["main"].body.blocks[0].bindings if getattr(b.value, "op", None) is not None]
    (product,) = [v for v in products if isinstance(v, relax.Call) and v.op.name == "relax.matmul"]
    assert product.ty.dtype == "float16"
    inputs = [x.astype("float16") for x in inputs_of(before)]
    np.testing.assert_allclose(run(after, *inputs), run(before, *inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "options",
    [
        {"strides": (2, 3), "rows": 3 * 4},
        {"padding": (2, 0), "rows": 3 * 4, "kernel": (4, 3)},
        {"dilation": (2, 1), "kernel": (4, 3), "rows": 1 * 4},
        {"shape": (2, 3, 9, 12)},
        {"turned": False},
    ],
    ids=["overlapping", "padded", "dilated", "a rest", "not turned"],
)
def test_other_convolutions_stay(options):
    before = module(**options)
    tvm.ir.assert_structural_equal(PatchesToProduct()(before), before)


def test_weights_that_are_wider_than_the_result_keep_their_digits():
    def body(builder):
        emit = builder.emit
        out = emit(op.nn.conv2d(emit(op.astype(x, "float32")), weight(16, 3, 4, 3), strides=(4, 3)))
        out = emit(op.reshape(emit(op.astype(out, "float16")), (2, 16, 8)))
        return emit(op.permute_dims(out, [0, 2, 1]))

    x = relax.Var("x", relax.TensorType((2, 3, 8, 12), "float16"))
    before = module_of([x], body)
    tvm.ir.assert_structural_equal(PatchesToProduct()(before), before)
