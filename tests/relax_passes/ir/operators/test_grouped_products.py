"""The operators of grouped products: their types, and what they do not take."""

import pytest
from tvm import relax

from relax_passes.ir.operators.grouped_products import grouped_product, problem_of_call
from tests.relax_passes.fusion.modules import function_of
from tir_kernels.fusion.grouped.problem import GroupedProblem


def tensors(a=(6, 4), w=(3, 8, 4), offsets=(3,), dtype="float16", w_dtype="float16", offsets_dtype="int64"):
    specs = (a, dtype), (w, w_dtype), (offsets, offsets_dtype)
    return [relax.Var(name, relax.TensorType(*spec)) for name, spec in zip(("a", "w", "offsets"), specs)]


@pytest.mark.parametrize("layout, w", [("nk", (3, 8, 4)), ("kn", (3, 4, 8))])
def test_type_and_problem(layout, w):
    params = tensors(w=w)
    function = function_of(params, lambda emit: emit(grouped_product(*params, layout)))
    call = function.body.blocks[0].bindings[0].value
    assert [int(n) for n in call.ty.shape] == [6, 8] and str(call.ty.dtype) == "float16"
    assert problem_of_call(call) == GroupedProblem(6, 8, 4, 3, "float16", layout, "int64")


@pytest.mark.parametrize("wrong", [{"w": (3, 8, 5)}, {"offsets": (4,)}, {"w_dtype": "float32"}])
def test_operands_that_do_not_fit(wrong):
    params = tensors(**wrong)
    with pytest.raises(ValueError, match="grouped_linear of a"):
        relax.BlockBuilder().normalize(grouped_product(*params, "nk"))
