"""A compiler for sparse-Transformer inference on Apache TVM (STOF, arXiv 2506.06095).

    engine = stof_tvm.build(model, target="cuda -arch=sm_80", example_inputs=(ids,), mask=stof_tvm.masks.bigbird())
    logits = engine(ids)

The other packages are what it is made of: `relax_passes` rewrites models, `tir_kernels` computes.
"""

import importlib

__version__ = "0.1.0"

# Loaded at first use, so that `import stof_tvm.masks` or a loaded engine does not pay for the compiler.
_HOMES = {
    "Engine": "stof_tvm.engine",
    "Report": "stof_tvm.report",
    "StofError": "stof_tvm.errors",
    "build": "stof_tvm.compiler",
    "errors": "stof_tvm",
    "load": "stof_tvm.engine",
    "masks": "stof_tvm",
    "pictures": "stof_tvm",
    "sparse_attention": "stof_tvm.attention",
    "tune": "stof_tvm.tuning.tune",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module 'stof_tvm' has no attribute {name!r}")
    home = _HOMES[name]
    value = importlib.import_module(f"{home}.{name}" if home == __name__ else home)
    value = value if home == __name__ else getattr(value, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
