"""Loading of compiled libraries, which stay mapped as long as something uses them."""

from pathlib import Path

import tvm_ffi


def load_library(path: Path):
    """The module in a shared library.  It stays mapped until nothing uses its code, even if its file is deleted.

    `tvm.runtime.load_module` would keep it mapped, with its weights, until the process ends.
    """
    return tvm_ffi.load_module(str(path.resolve()), keep_module_alive=False)
