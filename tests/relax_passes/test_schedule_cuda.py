import pytest
import tvm
from tvm import relax
from tvm.script import tirx as T

from relax_passes.schedule_cuda import ScheduleForCUDA, cuda_passes
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
