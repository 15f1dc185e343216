"""Which kernels are launched beside the one before them, and what they do first."""

import re
from dataclasses import replace

import pytest
import torch
import tvm

import stof_tvm
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.compile import cuda_source, tir_pipeline_name
from tir_kernels.fusion.gemm import gemm as gemm_cuda
from tir_kernels.fusion.gemm.sizes.config import GemmConfig
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.target import parse_target

PRODUCT = GemmProblem(72, 64, "float16", k=128)
WGMMA = GemmConfig(64, 64, 64, 4, 1, 3, warpgroup=True)
TMA = GemmConfig(64, 64, 64, 4, 1, 3, warpgroup=True, tma=True)
MMA = GemmConfig(64, 64, 32, 2, 2, 3)
NORM = RowProblem(8, 64, "float16", norm=Norm("rms_norm", 1e-6))


@pytest.fixture(autouse=True)
def no_machine_code(monkeypatch):
    """CUDA C++ is enough here."""
    monkeypatch.setattr("tir_kernels.cuda.compile.run_nvcc", lambda *arguments: (b"", ""))
    monkeypatch.setattr("tir_kernels.cuda.compile.have_nvcc", lambda: True)


def compiled(module, arch):
    target = parse_target(f"cuda -arch={arch}")
    with target:
        return tvm.compile(module, target=target, tir_pipeline=tir_pipeline_name)


def first_lines(source: str) -> dict[str, list[str]]:
    """The first two statements of each kernel."""
    kernels = re.findall(r"__global__ void __launch_bounds__\(.*?\) (\w+)\([^;{]*\) \{\n(.*)\n(.*)\n", source)
    return {name: [line.strip() for line in lines] for name, *lines in kernels}


def source_of(template, problem, config, arch) -> str:
    with quick_script():
        function = template.instantiate(problem, config, parse_target(f"cuda -arch={arch}"))
    return cuda_source(compiled(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}), arch))


WAIT = "tvm_builtin_ptx_griddepcontrol_wait();"
LAUNCH = "tvm_builtin_ptx_griddepcontrol_launch_dependents();"


def test_a_kernel_waits_for_the_one_before_and_lets_the_next_one_start():
    config = row_norm_cuda.configs(NORM, parse_target("cuda -arch=sm_90a"))[0]
    lines = first_lines(source_of(row_norm_cuda, NORM, config, "sm_90a"))
    assert lines == {"main_kernel": [WAIT, LAUNCH]}


@pytest.mark.parametrize("config", [MMA, WGMMA], ids=["mma", "wgmma"])
def test_a_product_waits_and_lets_nothing_start_beside_it(config):
    source = source_of(gemm_cuda, PRODUCT, config, "sm_90a")
    assert first_lines(source)["main_kernel"][0] == WAIT
    assert LAUNCH not in source


@pytest.mark.parametrize("config", [TMA, replace(TMA, splits=2)], ids=["tma", "cluster"])
def test_barriers_are_readied_before_the_wait_and_memory_is_read_after_it(config):
    source = source_of(gemm_cuda, PRODUCT, config, "sm_90a")
    kernel = source[source.rindex("__global__") :]
    assert kernel.count(WAIT) == 1 and LAUNCH not in source
    before, after = kernel.split(WAIT)
    assert "mbarrier_init" in before and "prefetch_tensormap" in before
    reads = re.compile(r"cp_async_bulk|ld_global|st_global|mbarrier_wait|cluster_arrive")
    assert not reads.search(before) and reads.search(after)


def test_older_gpus_have_no_such_launches():
    config = row_norm_cuda.configs(NORM, parse_target("cuda -arch=sm_80"))[0]
    for template, problem, some in ((row_norm_cuda, NORM, config), (gemm_cuda, PRODUCT, MMA)):
        assert "griddepcontrol" not in source_of(template, problem, some, "sm_80")


def test_kernels_of_tvms_own_schedules_wait_too():
    class Softmax(torch.nn.Module):
        def forward(self, x):
            return torch.softmax(x.cumsum(1), dim=1)

    engine = stof_tvm.build(Softmax(), "cuda -arch=sm_90a", (torch.ones(8, 64),), tuning_logs=False)
    lines = first_lines(engine.cuda_source())
    assert len(lines) > 1 and all(found == [WAIT, LAUNCH] for found in lines.values())
