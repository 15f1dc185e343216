import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from relax_passes.reduce_to_scalar import ReduceToScalar
from relax_passes.schedule_cuda import ScheduleForCUDA, cuda_passes
from tir_kernels.cuda_compile import cuda_source, have_nvcc, resource_usage
from tir_kernels.target import parse_target


@T.prim_func(s_tir=True)
def add_one(x: T.Buffer((256,), "float16"), y: T.Buffer((256,), "float16")):
    for i in range(256):
        with T.sblock("add"):
            v = T.axis.spatial(256, i)
            y[v] = x[v] + T.float16(1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_an_unscheduled_function_is_bound_to_threads(arch):
    mod = ScheduleForCUDA(parse_target(f"cuda -arch={arch}"))(tvm.IRModule({"add_one": add_one}))
    scheduled = mod["add_one"]
    assert bool(scheduled.attrs["tirx.is_scheduled"])
    assert "threadIdx.x" in scheduled.script() and "threadIdx.x" not in add_one.script()


def test_a_scheduled_function_comes_back_as_it_was():
    mod = tvm.IRModule({"add_one": add_one.with_attr("tirx.is_scheduled", True)})
    tvm.ir.assert_structural_equal(ScheduleForCUDA(parse_target("cuda -arch=sm_80"))(mod), mod)


@pytest.mark.parametrize("shape", [(2, 128, 768), (37,)])
def test_a_whole_tensor_is_reduced_by_a_cta(shape):
    """fp16 T5 asks whether any element is infinite, twice a layer; one thread takes milliseconds for that."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, "float16"))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.max(relax.op.astype(relax.op.isinf(x), "int32")))
        builder.emit_func_output(out)
    target = parse_target("cuda -arch=sm_80")
    with target:
        mod = tvm.transform.Sequential(cuda_passes(target))(builder.finalize())
    (kernel,) = [f for _, f in mod.functions_items() if not isinstance(f, relax.Function)]
    with target:
        code = cuda_source(tvm.compile(tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")}), target))
    assert "__launch_bounds__(1024)" in code and "__shfl_down_sync" in code
    assert not have_nvcc() or resource_usage(code, "sm_80")[0].spill_bytes == 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_reduction_that_keeps_an_axis_is_not_for_that_rule(arch):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((128, 768), "float16"))
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(relax.op.sum(x, axis=1)))
    (kernel,) = [
        f for _, f in relax.transform.LegalizeOps()(builder.finalize()).functions_items()
        if not isinstance(f, relax.Function)
    ]  # fmt: skip
    assert ReduceToScalar().apply(kernel, parse_target(f"cuda -arch={arch}"), False) is None
    assert ReduceToScalar().apply(add_one, parse_target(f"cuda -arch={arch}"), False) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_matrix_products_get_tensor_cores_also_where_the_name_has_a_suffix(arch):
    """dlight by itself takes "sm_90a" for an architecture without them."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType((128, 128), "float16")) for name in "xw")
    with builder.function("main", [x, w]):
        with builder.dataflow():
            out = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(out)
    target = parse_target(f"cuda -arch={arch}")
    with target:
        mod = tvm.transform.Sequential(cuda_passes(target))(builder.finalize())
    (kernel,) = [f for _, f in mod.functions_items() if not isinstance(f, relax.Function)]
    assert "wmma" in kernel.script() or "mma_sync" in kernel.script()
