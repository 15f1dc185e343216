"""CUDA compilation: what is embedded, what ptxas reports, and modules that mix both TensorIR dialects."""

import shutil

import pytest
import tvm
from tvm.script import tirx as T

from tir_kernels.cuda import compile as cuda_compile
from tir_kernels.errors import CompileError
from tir_kernels.target import parse_target

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: nothing can be compiled")
TARGET = parse_target("cuda -arch=sm_80")
COPY = """
extern "C" __global__ void copy(float* to, const float* from) {
  __shared__ float tile[32];
  tile[threadIdx.x] = from[threadIdx.x];
  __syncthreads();
  to[threadIdx.x] = tile[31 - threadIdx.x];
}
"""
SPILLS = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* a) {
  float x[96];
  #pragma unroll
  for (int i = 0; i < 96; ++i) x[i] = a[threadIdx.x + 1024 * i];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 96; ++i) a[threadIdx.x + 1024 * i] = x[95 - i] * x[(i * 37) % 96];
}
"""

# Between two products, something else touches the accumulators of both.
SERIALIZED = r"""
extern "C" __global__ void serialized(float* x, unsigned long long a, unsigned long long b) {
  float c[4] = {x[0], x[1], x[2], x[3]};
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  for (int i = 0; i < 4; ++i) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "l"(a), "l"(b));
    c[0] *= 2.0f;
  }
  asm volatile("wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < 4; ++i) x[i] = c[i];
}
"""


@T.prim_func
def add_one(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
    T.device_entry()
    T.cta_id([1])
    thread = T.thread_id([64])
    b[thread] = a[thread] + T.float32(1)


@T.prim_func(s_tir=True)
def double(a: T.Buffer((64,), "float32"), b: T.Buffer((64,), "float32")):
    T.func_attr({"tirx.is_scheduled": True})
    for i in T.thread_binding(64, "threadIdx.x"):
        with T.sblock("double"):
            v = T.axis.spatial(64, i)
            b[v] = a[v] * T.float32(2)


def codes(options):
    return [option for option in options if option != "-gencode"]


def test_a_target_is_embedded_as_machine_code_and_ptx():
    assert codes(cuda_compile.gencode("sm_80", None)) == [
        "arch=compute_80,code=sm_80",
        "arch=compute_80,code=compute_80",
    ]


def test_the_gpu_present_is_embedded_where_it_is_newer():
    assert "arch=compute_90,code=sm_90" in cuda_compile.gencode("sm_80", "sm_90")
    assert "arch=compute_90a,code=sm_90a" in cuda_compile.gencode("sm_80", "sm_90a")
    assert cuda_compile.gencode("sm_90", "sm_80a") == cuda_compile.gencode("sm_90", None)
    assert cuda_compile.gencode("sm_90", "sm_90") == cuda_compile.gencode("sm_90", None)
    assert cuda_compile.gencode("sm_90", "sm_80") == cuda_compile.gencode("sm_90", None)


def test_an_architecture_specific_target_has_no_ptx():
    assert codes(cuda_compile.gencode("sm_90a", "sm_90")) == ["arch=compute_90a,code=sm_90a"]


@needs_nvcc
def test_the_callback_of_tvm_gives_a_fatbin_with_ptx():
    callback = tvm.get_global_func("tvm_callback_cuda_compile")
    with TARGET:
        fatbin = bytes(callback(COPY))
    assert fatbin[:4] == bytes.fromhex("50ed55ba")  # the magic number of a fatbin
    alone, _ = cuda_compile.run_nvcc(COPY, "fatbin", ["-gencode", "arch=compute_80,code=sm_80"])
    assert len(fatbin) > len(alone)


@needs_nvcc
def test_resource_usage_reads_registers_shared_memory_and_spills():
    (copy,) = cuda_compile.resource_usage(COPY, "sm_80")
    assert copy.kernel == "copy" and copy.static_shared_bytes == 128 and copy.spill_bytes == 0 < copy.registers < 32
    (spills,) = cuda_compile.resource_usage(SPILLS, "sm_90a")
    assert spills.registers <= 32 and spills.spill_bytes > 0 and spills.stack_bytes > 0
    assert [u.kernel for u in cuda_compile.resource_usage(COPY + SPILLS, "sm_80")] in (
        ["copy", "spills"],
        ["spills", "copy"],
    )


@needs_nvcc
def test_resource_usage_tells_where_products_of_warpgroups_wait_for_each_other():
    usage = cuda_compile.resource_usage(COPY + SERIALIZED, "sm_90a")
    assert {u.kernel: u.serialized_wgmma for u in usage} == {"copy": False, "serialized": True}


@needs_nvcc
def test_what_nvcc_refuses_is_one_error_with_its_message():
    with pytest.raises(CompileError, match='identifier "nonsense" is undefined'):
        cuda_compile.run_nvcc("__global__ void f() { nonsense; }", "cubin", ["-arch=sm_80"])


def test_a_module_of_both_dialects_compiles_to_one_source():
    module = tvm.IRModule({"add_one": add_one, "double": double})
    with TARGET:
        executable = tvm.compile(module, target=TARGET, tir_pipeline=cuda_compile.tir_pipeline_name)
    source = cuda_compile.cuda_source(executable)
    assert "add_one_kernel" in source and "double_kernel" in source


def test_an_executable_without_cuda_has_no_source():
    executable = tvm.compile(
        tvm.IRModule(
            {
                "main": tvm.te.create_prim_func(
                    [x := tvm.te.placeholder((4,), name="x"), tvm.te.compute((4,), lambda i: x[i] + 1)]
                )
            }
        ),
        target="llvm",
    )
    with pytest.raises(CompileError, match="no CUDA module"):
        cuda_compile.cuda_source(executable)


def test_what_is_not_finite_is_written_as_a_number():
    source = 'a = f(nanf/*nan*/); b = f(-inff/*-inf*/); c = nanf(""); d = CUDART_INF_F/*inf*/;'
    number = "__int_as_float(0x7f"
    assert cuda_compile.with_numbers(source, None) == (
        f'a = f({number}c00000)); b = f(-{number}800000)); c = nanf(""); d = CUDART_INF_F/*inf*/;'
    )
