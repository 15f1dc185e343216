"""A target for tests of what passes make of a model: this CPU without LLVM's optimizer, which takes most of a build."""

import tempfile
from pathlib import Path

import tvm
from tvm import relax

from stof_tvm.running.native_log import without_noise
from tir_kernels.target import parse_target

QUICK_LLVM = parse_target({"kind": "llvm", "opt-level": 0})


def run_linked(executable) -> relax.VirtualMachine:
    """The virtual machine of an executable for QUICK_LLVM, its code in a shared library.

    TVM's just-in-time compiler selects instructions at LLVM's usual level whatever the target says, which takes four
    times as long as writing an object file at level 0 and linking it.
    """
    with tempfile.TemporaryDirectory() as folder, without_noise():
        library = Path(folder, "program.so")
        executable.export_library(str(library))
        return relax.VirtualMachine(tvm.runtime.load_module(str(library)), tvm.cpu())
