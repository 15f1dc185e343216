"""A target for tests of what passes make of a model: this CPU without LLVM's optimizer, which takes most of a build."""

from tir_kernels.target import parse_target

QUICK_LLVM = parse_target({"kind": "llvm", "opt-level": 0})
