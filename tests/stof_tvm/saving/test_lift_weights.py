"""Large constants become parameters; the rest of the module stays."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

import stof_tvm
from stof_tvm.saving.lift_weights import LEAST_BYTES, PART_BYTES, lift_weights
from tests.models.quick_llvm import QUICK_LLVM

LARGE = LEAST_BYTES // 4


def module(*arrays) -> tvm.IRModule:
    """main(x) calls f(x, constant) for each array, and returns x with the last."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x], attrs={"relax.force_pure": True}):
        constants = [relax.const(array) for array in arrays]
        for constant in constants:
            builder.emit(relax.Call(relax.ExternFunc("f"), [x, constant], ty_args=[x.ty]))
        builder.emit_func_output(relax.Tuple([x, constants[-1]]))
    return builder.get()


def constants(mod) -> list:
    found = []
    relax.analysis.post_order_visit(mod["main"], lambda e: found.append(e) if isinstance(e, GenericConst) else None)
    return found


def test_large_constants_become_parameters_after_the_inputs():
    arrays = [np.arange(LARGE, dtype="float32"), np.arange(LARGE - 1, dtype="float32"), np.ones((LARGE, 2), "int32")]
    mod = module(*arrays)
    lifted, weights = lift_weights(mod)
    assert [str(p) for p in lifted["main"].params] == ["x", "weight0", "weight1"]
    assert [tuple(w.shape) for w in weights] == [(LARGE,), (LARGE, 2)] and weights[1].dtype == torch.int32
    assert np.array_equal(weights[0].numpy(), arrays[0])
    (small,) = constants(lifted)
    assert np.array_equal(small.value.numpy(), arrays[1])
    calls = [binding.value for block in lifted["main"].body.blocks for binding in block.bindings]
    weight0, weight1 = lifted["main"].params[1:]
    assert calls[0].args[1].same_as(weight0) and calls[2].args[1].same_as(weight1)
    assert len(mod["main"].params) == 1, "the module given stays as it is"
    assert lifted["main"].attrs["global_symbol"] == mod["main"].attrs["global_symbol"]


def test_an_output_is_lifted_too():
    lifted, _ = lift_weights(module(np.ones(LARGE, "float32")))
    assert constants(lifted) == []
    relax.analysis.well_formed(lifted)


@pytest.mark.parametrize(
    ("other", "is_shared"),
    [
        (np.arange(2 * LARGE, dtype="float32"), True),
        (np.arange(2 * LARGE, dtype="float32").reshape(2, -1), False),
        (np.arange(2 * LARGE, dtype="float32").view("int32"), False),
        (np.arange(1, 2 * LARGE + 1, dtype="float32"), False),
    ],
)
def test_equal_constants_share_a_parameter(other, is_shared):
    _, weights = lift_weights(module(np.arange(2 * LARGE, dtype="float32"), other))
    assert len(weights) == (1 if is_shared else 2)


def test_nan_and_signed_zero_are_compared_by_their_bits():
    nan, zeros = np.full(LARGE, np.nan, "float32"), np.zeros(LARGE, "float32")
    _, weights = lift_weights(module(nan, nan.copy(), zeros, -zeros))
    assert len(weights) == 3


def test_a_dtype_that_pytorch_lacks_stays():
    mod = module(np.ones(LARGE, "float32"))
    odd = relax.const(tvm.runtime.empty((LEAST_BYTES,), "float8_e3m4"))
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((2,), "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(relax.Tuple([x, odd]))
    assert lift_weights(mod)[1] != [] and lift_weights(builder.get())[1] == []


class Returns(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * 2, torch.zeros(3), (self.weight, torch.arange(4)), torch.tensor(True)


def test_constant_results_are_the_callers_own(tmp_path):
    """Writing into one changes no later call: the engine gives copies."""
    model, x = Returns().eval(), torch.ones(2)
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False)
    engine.save(tmp_path / "engine.stof")
    expected = [result.clone() for result in torch.utils._pytree.tree_leaves(model(x))]
    for one in (engine, stof_tvm.load(tmp_path / "engine.stof")):
        for _ in range(2):
            results = torch.utils._pytree.tree_leaves(one(x))
            for result, want in zip(results, expected, strict=True):
                assert torch.equal(result, want) and result.dtype == want.dtype
                result.logical_not_() if result.dtype == torch.bool else result.add_(5)


def test_tensors_that_differ_anywhere_stay_apart():
    first = np.arange(PART_BYTES, dtype="float32")
    other = first.copy()
    other[len(other) // 2] += 1  # where no checksum looks
    _, tensors = lift_weights(module(first, other, first.copy()))
    assert [tensor.numpy().tolist() for tensor in tensors] == [first.tolist(), other.tolist()]
