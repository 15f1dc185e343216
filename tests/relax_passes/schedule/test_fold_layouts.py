"""FoldLayouts: what `FoldConstant` makes of transposes and reshapes of constants, without a program for each."""

import sys

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax import op

from relax_passes.ir.constant_arrays import array_of
from relax_passes.schedule.fold_layouts import FoldLayouts
from tests.relax_passes.fusion.modules import encoder_decoder, gated_mlp, module_of, post_norm_layer

LATER = [relax.transform.LegalizeOps(), relax.transform.AnnotateTIROpPattern(), relax.transform.FoldConstant()]
TIDY = [relax.transform.CanonicalizeBindings(), relax.transform.DeadCodeElimination()]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "uint8", "bool"]
LAYOUTS = {
    "permuted": lambda emit, c: emit(op.permute_dims(c, (1, 2, 0))),
    "reversed": lambda emit, c: emit(op.permute_dims(c)),
    "from behind": lambda emit, c: emit(op.permute_dims(c, (-1, 0, -2))),
    "reshaped": lambda emit, c: emit(op.reshape(c, (4, -1))),
    "flat": lambda emit, c: emit(op.flatten(c)),
    "more dimensions": lambda emit, c: emit(op.squeeze(emit(op.expand_dims(c, [0, 2])), [0])),
    "one after another": lambda emit, c: emit(op.permute_dims(emit(op.reshape(emit(op.permute_dims(c)), (2, 10, 3))))),
    "first rows": lambda emit, c: emit(op.strided_slice(c, [0], [0], [2])),
    "every other": lambda emit, c: emit(op.strided_slice(c, [1], [0], [4], [2])),
    "every third, from the second on": lambda emit, c: emit(op.strided_slice(c, [2], [1], [5], [3])),
    "last ones": lambda emit, c: emit(op.strided_slice(c, [1, -1], [-3, -2], [4, 99])),
    "all": lambda emit, c: emit(op.strided_slice(c, [0], [0], [3])),
    "none": lambda emit, c: emit(op.strided_slice(c, [1], [2], [2])),
    "broadcast": lambda emit, c: emit(op.broadcast_to(c, (2, 3, 4, 5))),
    "broadcast within": lambda emit, c: emit(
        op.broadcast_to(emit(op.reshape(emit(op.strided_slice(c, [1], [2], [3])), (3, 1, 1, 5))), (3, 2, 4, 5))
    ),
    "broadcast, reshaped and cut": lambda emit, c: emit(
        op.strided_slice(emit(op.reshape(emit(op.broadcast_to(c, (2, 3, 4, 5))), (6, 2, 10))), [2], [1], [10], [3])
    ),
    "a cut, transposed, and cut": lambda emit, c: emit(
        op.strided_slice(emit(op.permute_dims(emit(op.strided_slice(c, [0], [1], [3])))), [0, 1], [1, 0], [4, 2])
    ),
}
NEAR_MISSES = {
    "from behind, by a slice": lambda emit, c: emit(op.strided_slice(c, [1], [3], [0], [-1])),
    "backwards": lambda emit, c: emit(op.flip(c, 1)),
    "repeated": lambda emit, c: emit(op.tile(c, (1, 2, 1))),
    "joined": lambda emit, c: emit(op.concat([c, c], 1)),
    "gathered": lambda emit, c: emit(op.take(c, relax.const(np.array([2, 0, 1])), 0, mode="fast")),
    "another dtype": lambda emit, c: emit(op.astype(c, "float16")),
    "negative": lambda emit, c: emit(op.negative(c)),
    "a part": lambda emit, c: emit(op.split(c, [1], 1))[0],
    "a lower triangle": lambda emit, c: emit(op.tril(c)),
}


def constant_of(dtype="float32", shape=(3, 4, 5)) -> relax.Expr:
    """A constant that has bits of all kinds."""
    bits = np.random.default_rng(0).integers(0, 256, (*shape, 8), np.uint8)
    values = bits[..., 0] > 99 if dtype == "bool" else bits.view(getattr(ml_dtypes, dtype, dtype))[..., 0]
    return relax.const(tvm.runtime.tensor(values))


def module(layout, constant) -> tvm.IRModule:
    """A module that returns its input and what `layout(emit, constant)` emits."""
    x = relax.Var("x", relax.TensorType((2,), "float32"))
    return module_of([x], lambda builder: builder.emit(relax.Tuple([x, layout(builder.emit, constant)])))


def constants_of(mod) -> list[np.ndarray]:
    found = []
    visit = lambda node: found.append(array_of(node)) if isinstance(node, GenericConst) else None
    relax.analysis.post_order_visit(tvm.transform.Sequential(TIDY)(mod)["main"], visit)
    return found


def operators_of(mod) -> list[str]:
    found = []
    visit = lambda node: found.append(node.op.name) if isinstance(node, relax.Call) else None
    relax.analysis.post_order_visit(tvm.transform.Sequential(TIDY)(mod)["main"], visit)
    return found


def constants_by_tvm(mod) -> list[np.ndarray]:
    return constants_of(tvm.transform.Sequential(LATER)(mod))


@pytest.fixture
def programs(monkeypatch) -> list:
    """The programs that are compiled."""
    built, builder = [], sys.modules["tvm.tirx.build"]
    generate = builder.codegen_build
    monkeypatch.setattr(builder, "codegen_build", lambda *args: built.append(args) or generate(*args))
    return built


def check_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    assert [(a.dtype, a.shape, a.tobytes()) for a in ours] == [(a.dtype, a.shape, a.tobytes()) for a in theirs]


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_is_what_tvm_computes(name, programs):
    mod = module(LAYOUTS[name], constant_of())
    ours = constants_of(FoldLayouts()(mod))
    assert len(ours) == 1 and not operators_of(FoldLayouts()(mod)) and not programs
    check_same(ours, constants_by_tvm(mod))
    assert programs


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_kept(dtype):
    mod = module(LAYOUTS["one after another"], constant_of(dtype))
    check_same(constants_of(FoldLayouts()(mod)), constants_by_tvm(mod))


def test_what_only_layouts_read_is_not_copied():
    zero = lambda: relax.const(np.float16(0))
    rows = lambda emit: emit(op.strided_slice(emit(op.broadcast_to(zero(), (1 << 20, 1 << 20))), [0], [0], [2]))
    mod = module(lambda emit, _: relax.Tuple([emit(op.permute_dims(rows(emit))) for _ in range(3)]), constant_of())
    found = constants_of(FoldLayouts()(mod))
    assert {x.shape for x in found} == {(1 << 20, 2)} and len({x.ctypes.data for x in found}) == 1  # for all readers


@pytest.mark.parametrize("shape", [(1, 4, 1), (0, 4, 5), ()])
def test_sizes_of_one_and_none(shape):
    (ours,) = constants_of(FoldLayouts()(module(LAYOUTS["reversed"], constant_of(shape=shape))))
    assert ours.shape == shape[::-1]


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_operators_stay(name):
    mod = module(NEAR_MISSES[name], constant_of())
    assert FoldLayouts()(mod).same_as(mod)
    # And so does what lays out their results: it is a constant only for `FoldConstant`.
    later = module(lambda emit, c: emit(op.permute_dims(NEAR_MISSES[name](emit, c))), constant_of())
    assert FoldLayouts()(later).same_as(later) and "relax.permute_dims" in operators_of(later)


def test_inputs_and_lengths_that_are_no_numbers_stay():
    n = tvm.tirx.Var("n", "int64")
    x, y = relax.Var("x", relax.TensorType((4, 5), "float32")), relax.Var("y", relax.TensorType((n,), "float32"))
    body = lambda build: build.emit(
        relax.Tuple([y, build.emit(op.permute_dims(x)), build.emit(op.reshape(constant_of(), relax.ShapeExpr([n, 5])))])
    )
    mod = module_of([x, y], body)
    assert FoldLayouts()(mod).same_as(mod)


@pytest.mark.parametrize("make", [post_norm_layer, gated_mlp, encoder_decoder])
def test_modules_are_the_same_after_tvms_folding(make, programs):
    mod = make()
    rest = tvm.transform.Sequential([*LATER, relax.transform.FuseOps(), relax.transform.FuseTIR(), *TIDY])
    ours = rest(FoldLayouts()(mod))
    assert not programs
    theirs = rest(mod)
    assert programs and tvm_ffi.structural_equal(ours, theirs)


def test_functions_of_segments_are_folded_too():
    mod = module(lambda emit, c: c, constant_of())
    segment = module(LAYOUTS["permuted"], constant_of())["main"].without_attr("global_symbol")
    mod.update(tvm.IRModule({"segment": segment}))
    folded = FoldLayouts()(mod)
    assert folded["main"].same_as(mod["main"]) and "permute_dims" not in folded["segment"].script()
