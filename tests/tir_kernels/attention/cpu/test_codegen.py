"""What the CPU kernels compile to: vector code without library calls, also for other machines and inside Relax."""

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax, tirx

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.reference import attention_reference
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import parse_target


def problem_of(dtype, **kwargs):
    return AttentionProblem(1, 2, 2, 128, 128, 64, 64, dtype, 0.125, **kwargs)


def assembly(template, problem, target):
    target = parse_target(target)
    with quick_script():
        function = template.instantiate(problem, template.configs(problem, target)[0], target)
    return tvm.compile(function, target=target).mod.inspect_source("asm")


@pytest.mark.parametrize(
    "dtype, conversions", [("float32", ()), ("float16", ("vcvtph2ps", "vcvtps2ph")), ("bfloat16", ())]
)
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_avx512(template, dtype, conversions, softcap):
    target = {"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu"}
    lines = assembly(template, problem_of(dtype, softcap=softcap), target).splitlines()
    products = [line for line in lines if "vfmadd" in line and "ps" in line]
    assert len(products) > 20 and all("zmm" in line for line in products)
    for instruction in conversions:
        assert any(instruction in line for line in lines)
    called = {line.split()[-1].partition("@")[0] for line in lines if line.lstrip().startswith("call")}
    assert not {name for name in called if name.startswith(("exp", "tanh", "__ext", "__trunc", "__gnu", "floor"))}


def test_register_tiles_do_not_spill():
    """Each product's loop holds its accumulators in registers: no stack access between the multiply-adds."""
    from tir_kernels.attention.cpu import block_wise as block_wise_cpu

    target = {"kind": "llvm", "mcpu": "znver4", "mtriple": "x86_64-linux-gnu"}
    loops, loop = [], []
    for line in assembly(block_wise_cpu, problem_of("float32"), target).splitlines():
        if line.startswith(".L"):
            loop = []
        loop.append(line)
        if line.lstrip().startswith("j"):
            loops.append(loop)
            loop = []
    hot = [loop for loop in loops if sum("vfmadd231ps" in line for line in loop) >= 16]
    assert len(hot) >= 4  # two products, for full and for partial blocks
    spilled = [line for loop in hot for line in loop if "zmm" in line and "rsp" in line]
    per_product = len(spilled) / sum("vfmadd231ps" in line for loop in hot for line in loop)
    assert per_product < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiles_for_aarch64(template, dtype):
    target = {"kind": "llvm", "mcpu": "cortex-a76", "mtriple": "aarch64-linux-gnu"}
    assert "fmla" in assembly(template, problem_of(dtype), target)


def test_refuses_other_targets(template):
    cuda = tvm.target.Target({"kind": "cuda", "arch": "sm_80"})
    assert "cuda" in template.unsupported(problem_of("float16"), cuda)
    assert template.unsupported(problem_of("float16"), parse_target("llvm")) is None


def test_runs_inside_a_relax_module(template):
    """Relax's default LLVM pipeline leaves the scheduled kernel alone and compiles it."""
    problem, target = problem_of("float32", bias_shape=(1, 1, 1, 128)), parse_target("llvm")
    config = template.configs(problem, target)[0]
    keep = np.random.default_rng(0).random((128, 128)) < 0.3
    mask = BlockSparseMask.from_dense(keep, (config.block_m, config.block_n))
    operands = template.operands(problem, config, target, mask).arrays
    tensors = [torch.randn(problem.shape(x)) for x in "qkv"] + [torch.randn(1, 1, 1, 128)]
    builder = relax.BlockBuilder()
    with quick_script():
        kernel = builder.add_func(template.instantiate(problem, config, target), "attention")
    params = [relax.Var(name, relax.TensorType(x.shape, "float32")) for name, x in zip("qkvb", tensors)]
    with builder.function("main", params):
        with builder.dataflow():
            out_type = relax.TensorType(problem.shape("out"), "float32")
            call = relax.call_tir(kernel, [*params, *map(relax.const, operands)], out_type)
            result = builder.emit_output(builder.emit(relax.op.multiply(call, relax.const(2.0, "float32"))))
        builder.emit_func_output(result)
    executable = tvm.compile(builder.get(), target=target)
    got = relax.VirtualMachine(executable, tvm.cpu())["main"](*tensors).numpy()
    expected = 2 * attention_reference(problem, *tensors[:3], keep, tensors[3])
    assert np.abs(got - expected).max() < 2e-5


def loops_of_data(template, q_len, kv_len) -> int:
    """Loops of the kernel whose length is not constant."""
    problem = AttentionProblem(1, 2, 2, q_len, kv_len, 64, 64, "float32", 0.125)
    target = parse_target("llvm")
    with quick_script():
        function = template.instantiate(problem, template.configs(problem, target)[0], target)
    extents = []
    tvm_ffi.structural_walk(function.body, (tirx.For, lambda loop: extents.append(loop.extent) or None), order="post")
    return sum(not isinstance(extent, tirx.IntImm) for extent in extents)


def test_what_is_past_the_edges_of_a_ragged_block_is_not_computed():
    from tir_kernels.attention.cpu import block_wise as block_wise_cpu

    # Both lists; then scores, probabilities and values in each of the loops over blocks.
    assert loops_of_data(block_wise_cpu, 128, 128) == 2
    assert loops_of_data(block_wise_cpu, 197, 128) == 2 + 2 * 3
    assert loops_of_data(block_wise_cpu, 128, 197) == 2 + 3
