import numpy as np
import pytest
import torch
import tvm
from tvm import relax, te
from tvm.script import tirx as T

from relax_passes.schedule.cuda import ScheduleForCUDA, cuda_passes
from relax_passes.schedule.cuda_rules.elementwise import Elementwise
from relax_passes.schedule.cuda_rules.fitting import STATIC_SHARED_BYTES, shared_bytes
from relax_passes.schedule.cuda_rules.reduce_rows import ReduceRows
from relax_passes.schedule.cuda_rules.short_rows import ShortRows
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.cuda.compile import cuda_source, have_nvcc, resource_usage
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


def module_of(shape, body, dtype="float16"):
    """main(x) that returns `body(x)`."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType(shape, dtype))
    with builder.function("main", [x]):
        with builder.dataflow():
            out = builder.emit_output(body(x))
        builder.emit_func_output(out)
    return builder.finalize()


def has_infinity(x):
    """fp16 T5 asks for it twice a layer; one thread takes milliseconds for that."""
    return relax.op.max(relax.op.astype(relax.op.isinf(x), "int32"))


def kernels(mod, target) -> dict[str, tvm.tirx.PrimFunc]:
    with target:
        mod = tvm.transform.Sequential(cuda_passes(target))(mod)
    return {name.name_hint: f for name, f in mod.functions_items() if not isinstance(f, relax.Function)}


def code_of(kernel, target) -> str:
    with target:
        return cuda_source(tvm.compile(tvm.IRModule({"kernel": kernel.with_attr("global_symbol", "kernel")}), target))


@pytest.mark.parametrize("shape", [(37,), (2, 128, 768)])
def test_a_whole_tensor_is_reduced_by_all_threads_of_a_cta(shape):
    """Where no template does it, as in float64."""
    target = parse_target("cuda -arch=sm_80")
    (kernel,) = kernels(module_of(shape, has_infinity), target).values()
    code = code_of(kernel, target)
    assert "__shfl_down_sync" in code and "__habs" in code
    assert not have_nvcc() or resource_usage(code, "sm_80")[0].spill_bytes == 0


def test_large_elementwise_functions_have_several_elements_a_thread():
    target = parse_target("cuda -arch=sm_80")
    body = lambda x: relax.op.minimum(relax.op.maximum(x, relax.const(-2.0, "float16")), relax.const(2.0, "float16"))
    (large,) = kernels(module_of((16, 512, 768), body), target).values()
    (small,) = kernels(module_of((16, 512), body), target).values()
    assert "__launch_bounds__(256)" in code_of(large, target)
    assert "__launch_bounds__(1024)" in code_of(small, target)


def legalized(mod):
    mod = relax.transform.LegalizeOps()(mod)
    return next(f for _, f in mod.functions_items() if not isinstance(f, relax.Function))


SHORT = {
    "a softmax": ((4096, 9), lambda x: relax.op.nn.softmax(x, -1)),
    "its axis before one of length 1": ((4096, 9, 1), lambda x: relax.op.nn.softmax(x, 1)),
    "several leading axes": ((4, 1024, 16), lambda x: relax.op.nn.log_softmax(x, -1)),
    "what is left of a mean": ((4100, 12), lambda x: relax.op.subtract(x, relax.op.mean(x, -1, keepdims=True))),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_thread_has_a_short_row(name):
    """As the weights of ConvBERT's kernels, 24,576 rows of 9; dlight would give each a CTA."""
    shape, body = SHORT[name]
    target = parse_target("cuda -arch=sm_80")
    (kernel,) = kernels(module_of(shape, body), target).values()
    code = code_of(kernel, target)
    assert "__launch_bounds__(128)" in code and "__shared__" not in code and "__syncthreads" not in code
    assert not have_nvcc() or resource_usage(code, "sm_80")[0].spill_bytes == 0


def deviations(x):
    """In standard ones: two reductions, of which the second one reads what the first one left."""
    return relax.op.divide(x, relax.op.sqrt(relax.op.variance(x, -1, keepdims=True)))


RESULTS = {
    "softmax": (lambda x: relax.op.nn.softmax(x, -1), lambda x: torch.softmax(x, -1)),
    "log_softmax": (lambda x: relax.op.nn.log_softmax(x, -1), lambda x: torch.log_softmax(x, -1)),
    "deviations": (deviations, lambda x: x / x.var(-1, correction=0, keepdim=True).sqrt()),
}


@needs_gxx
@pytest.mark.parametrize("elements", [9, 16])
@pytest.mark.parametrize("name", RESULTS)
def test_short_rows_on_the_cpu(name, elements, tmp_path):
    """Their generated CUDA, the last CTA not full."""
    body, reference = RESULTS[name]
    target = parse_target("cuda -arch=sm_90a")
    (kernel,) = kernels(module_of((1028, elements), body, "float32"), target).values()
    launched = EmulatedKernel(code_of(kernel, target).replace("kernel_kernel(", "main_kernel("), tmp_path)
    x = torch.randn(1028, elements, generator=torch.Generator().manual_seed(elements))
    (result,) = (name.removesuffix("_ptr") for name in launched.parameters if name != "x_ptr")
    arrays = {"x": aligned(x.numpy()), result: aligned(np.full((1028, elements), np.nan, "float32"))}
    launched(arrays, {}, range(-(-1028 // 128)), 128, 0)
    np.testing.assert_allclose(arrays[result], reference(x.double()).numpy(), rtol=1e-5, atol=1e-6)


def test_short_rows_whose_reduction_has_two_results():
    """A maximum and its place: neither is left in memory that the kernel would have to allocate."""
    largest = lambda x: relax.op.astype(relax.op.argmax(x, -1, keepdims=True), "float16")
    target = parse_target("cuda -arch=sm_90a")
    found = kernels(module_of((4096, 9), lambda x: relax.op.subtract(x, largest(x))), target)
    code = code_of(found["fused_argmax_cast_subtract"], target)
    assert "__launch_bounds__(128)" in code and "__shared__" not in code


@pytest.mark.parametrize(("shape", "axis"), [((4096, 64), -1), ((512, 9), -1), ((9, 4096), 0)])
def test_rows_that_are_long_few_or_across_are_left_to_others(shape, axis):
    kernel = legalized(module_of(shape, lambda x: relax.op.nn.softmax(x, axis)))
    assert ShortRows().apply(kernel, parse_target("cuda -arch=sm_80"), False) is None


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_the_rules_leave_to_others(arch):
    target = parse_target(f"cuda -arch={arch}")
    first = legalized(module_of((128, 768), lambda x: relax.op.sum(x, axis=0)))
    short = legalized(module_of((4096, 8), lambda x: relax.op.sum(x, axis=1)))
    for kernel in (first, short, add_one):
        assert ReduceRows().apply(kernel, target, False) is None
    for kernel in (first, short, add_one):
        assert ShortRows().apply(kernel, target, False) is None
    for kernel in (first, add_one):
        assert Elementwise().apply(kernel, target, False) is None


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


@pytest.mark.parametrize("groups, length, kept", [(16, 500, False), (16, 12, True), (3, 70, True)])
def test_a_schedule_that_needs_more_shared_memory_than_there_is_gives_way(groups, length, kept):
    """A grouped convolution cut to its length, as speech models embed positions; dlight would keep all of it."""
    target = parse_target("cuda -arch=sm_90a")
    weight = relax.const(np.ones((48 * groups, 48, 128), "float16"))
    convolved = lambda x: relax.op.nn.conv1d(x, weight, padding=64, groups=groups)
    body = lambda x: relax.op.nn.gelu(relax.op.strided_slice(convolved(x), axes=[2], begin=[0], end=[length]))
    (kernel,) = kernels(module_of((1, 48 * groups, length), body), target).values()
    assert shared_bytes(kernel) <= STATIC_SHARED_BYTES and bool(shared_bytes(kernel)) == kept
    assert not have_nvcc() or resource_usage(code_of(kernel, target), "sm_90a")


@pytest.mark.parametrize("length", [77, 100])
def test_a_product_of_one_column_of_several_batches_has_a_schedule(length):
    """dlight's rule for vectors takes an extent of two merged dimensions for a number, and fails."""
    target = parse_target("cuda -arch=sm_90a")
    weight = relax.const(np.ones((48, 1), "float32"))
    body = lambda x: relax.op.matmul(relax.op.astype(x, "float32"), weight)
    found = kernels(module_of((2, length, 48), body), target).values()
    assert found and all("threadIdx.x" in kernel.script() for kernel in found)


def test_products_along_an_axis_of_one():
    """Angles of rotary positions in a batch: dlight's rule for vectors asserts that there is more to add up."""
    x, y = te.placeholder((2, 8, 1), "float32", "x"), te.placeholder((2, 1, 1), "float32", "y")
    axis = te.reduce_axis((0, 1), "axis")
    total = te.compute((2, 8, 1), lambda b, i, j: te.sum(x[b, i, axis] * y[b, axis, j], axis=axis))
    mod = ScheduleForCUDA(parse_target("cuda -arch=sm_90a"))(tvm.IRModule({"f": te.create_prim_func([x, y, total])}))
    assert "threadIdx.x" in mod["f"].script()
