"""A compiler for sparse-Transformer inference on Apache TVM (STOF, arXiv 2506.06095).

    engine = stof_tvm.build(model, target="cuda -arch=sm_80", example_inputs=(ids,), mask=stof_tvm.masks.bigbird())
    logits = engine(ids)

It is built on two other packages: `relax_passes` rewrites models, `tir_kernels` has the kernels.
"""

import importlib
from typing import TYPE_CHECKING

import tir_kernels  # noqa: F401  before TVM, whose import needs a home directory

__version__ = "0.1.0"

if TYPE_CHECKING:  # for editors and checkers: the same names as in _MODULE_OF
    from stof_tvm import errors as errors
    from stof_tvm import generation as generation
    from stof_tvm import masks as masks
    from stof_tvm import parallel as parallel
    from stof_tvm import pictures as pictures
    from stof_tvm.attention import sparse_attention as sparse_attention
    from stof_tvm.compiler import build as build
    from stof_tvm.engine import Engine as Engine
    from stof_tvm.errors import StofError as StofError
    from stof_tvm.generation import generate as generate
    from stof_tvm.packed.packed_engine import PackedEngine as PackedEngine
    from stof_tvm.range_engine import RangeEngine as RangeEngine
    from stof_tvm.report import RangeReport as RangeReport
    from stof_tvm.report import Report as Report
    from stof_tvm.rules.explained import explain_attention as explain_attention
    from stof_tvm.saving.loading import load as load
    from stof_tvm.tuning.tune import tune as tune

# Loaded at first use, so that `import stof_tvm.masks` or a loaded engine does not pay for the compiler.
_MODULE_OF = {
    "Engine": "stof_tvm.engine",
    "PackedEngine": "stof_tvm.packed.packed_engine",
    "RangeEngine": "stof_tvm.range_engine",
    "RangeReport": "stof_tvm.report",
    "Report": "stof_tvm.report",
    "StofError": "stof_tvm.errors",
    "build": "stof_tvm.compiler",
    "errors": "stof_tvm",
    "explain_attention": "stof_tvm.rules.explained",
    "generate": "stof_tvm.generation",
    "generation": "stof_tvm",
    "load": "stof_tvm.saving.loading",
    "masks": "stof_tvm",
    "parallel": "stof_tvm",
    "pictures": "stof_tvm",
    "sparse_attention": "stof_tvm.attention",
    "tune": "stof_tvm.tuning.tune",
}

__all__ = ["__version__", *_MODULE_OF]


if not TYPE_CHECKING:  # with `__getattr__`, a type checker would accept any name

    def __getattr__(name: str):
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'stof_tvm' has no attribute {name!r}")
        home = _MODULE_OF[name]
        value = importlib.import_module(f"{home}.{name}" if home == __name__ else home)
        value = value if home == __name__ else getattr(value, name)
        globals()[name] = value
        return value


def __dir__():
    return sorted(__all__)
