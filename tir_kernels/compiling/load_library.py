"""Loading of compiled libraries, which stay mapped as long as something uses them."""

from pathlib import Path

import tvm_ffi


def load_library(path: Path):
    """The module in a shared library; it stays mapped after its file is gone, until the last user of its code is.

    `tvm.runtime.load_module` would keep it, weights and all, until the process ends.
    """
    return tvm_ffi.load_module(str(path.resolve()), keep_module_alive=False)
