"""FoldTransposes: what `FoldConstant` makes of transposes of constants, without a program for each."""

import sys

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax, te, topi
from tvm.ir.expr import GenericConst
from tvm.relax import op

from relax_passes.ir.constant_arrays import array_of
from relax_passes.schedule.fold_transposes import FoldTransposes, axes_of
from tests.relax_passes.fusion.modules import encoder_decoder, gated_mlp, module_of, post_norm_layer

SHAPE = 3, 4, 5
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"]


def legalized(mod: tvm.IRModule) -> tvm.IRModule:
    return tvm.transform.Sequential([relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern()])(mod)


def permuted(dtype: str, axes=(1, 2, 0), shape=SHAPE) -> tvm.IRModule:
    """x == the permuted constant, which has bits of all kinds."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, 8), np.uint8)
    values = bits[..., 0] > 99 if dtype == "bool" else bits.view(getattr(ml_dtypes, dtype, dtype))[..., 0]
    x = relax.Var("x", relax.TensorType(tuple(shape[a] for a in axes), dtype))
    constant = relax.const(tvm.runtime.tensor(values))
    return module_of([x], lambda build: build.emit(op.equal(x, build.emit(op.permute_dims(constant, axes)))))


def constants_of(mod) -> list[np.ndarray]:
    found = []

    def visit(node):
        if isinstance(node, GenericConst):
            found.append(array_of(node))

    relax.analysis.post_order_visit(mod["main"], visit)
    return found


@pytest.mark.parametrize("make", [post_norm_layer, gated_mlp, encoder_decoder])
def test_the_module_is_what_fold_constant_makes(make):
    mod = legalized(make())
    fold = relax.transform.FoldConstant()
    ours = FoldTransposes()(mod)
    assert not tvm_ffi.structural_equal(ours, mod)
    assert tvm_ffi.structural_equal(fold(ours), fold(mod))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_kept(dtype):
    mod = legalized(permuted(dtype))
    (ours,), (theirs,) = constants_of(FoldTransposes()(mod)), constants_of(relax.transform.FoldConstant()(mod))
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape == (4, 5, 3)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("shape", [(1, 4, 1), (0, 4, 5)])
def test_sizes_of_one_and_none(shape):
    mod = legalized(permuted("float32", shape=shape))
    (ours,) = constants_of(FoldTransposes()(mod))
    assert ours.shape == (shape[1], shape[2], shape[0])


def test_nothing_is_left_to_compile(monkeypatch):
    mod, builds, builder = legalized(post_norm_layer()), [], sys.modules["tvm.tirx.build"]
    generate = builder.codegen_build
    monkeypatch.setattr(builder, "codegen_build", lambda *args: builds.append(args) or generate(*args))
    relax.transform.FoldConstant()(FoldTransposes()(mod))
    assert not builds
    relax.transform.FoldConstant()(mod)
    assert builds


def computed(function, shape=(4, 4)):
    x = te.placeholder(shape, "float32", name="x")
    return te.create_prim_func([x, function(x)])


NEAR_MISSES = {
    "shifted": lambda x: te.compute((4, 3), lambda i, j: x[j + 1, i]),
    "half": lambda x: te.compute((2, 4), lambda i, j: x[j, i * 2]),
    "diagonal": lambda x: te.compute((4, 4), lambda i, j: x[i, i]),
    "broadcast": lambda x: te.compute((4, 4, 2), lambda i, j, k: x[j, i]),
    "scaled": lambda x: te.compute((4, 4), lambda i, j: x[j, i] * 2.0),
    "cast": lambda x: te.compute((4, 4), lambda i, j: x[j, i].astype("float16")),
    "sum": lambda x: topi.sum(te.compute((4, 4, 1), lambda i, j, k: x[j, i]), 2),
    "twice": lambda x: te.compute((4, 4), lambda i, j: te.compute((4, 4), lambda m, n: x[n, m])[j, i]),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_misses(name):
    assert axes_of(computed(NEAR_MISSES[name])) is None


def test_axes():
    assert axes_of(computed(lambda x: te.compute((5, 3, 4), lambda i, j, k: x[j, k, i]), SHAPE)) == [2, 0, 1]


def test_what_depends_on_an_input_stays():
    x = relax.Var("x", relax.TensorType((4, 5), "float32"))
    mod = legalized(module_of([x], lambda builder: builder.emit(op.permute_dims(x))))
    assert FoldTransposes()(mod).same_as(mod)
