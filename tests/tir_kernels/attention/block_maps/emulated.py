"""A PrimFunc as a kernel that the CPU runs."""

import tvm

from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel
from tir_kernels.cuda.compile import cuda_source
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_90a")


def emulated(function, folder, name) -> EmulatedKernel:
    """The emulated kernel of a function; `folder` receives a folder of this name."""
    with TARGET:
        module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        text = cuda_source(tvm.compile(module, target=TARGET, tir_pipeline="tirx"))
    (folder / name).mkdir()
    return EmulatedKernel(text, folder / name)
