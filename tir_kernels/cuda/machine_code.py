"""Machine code that is saved beside CUDA source.

Without a CUDA driver, TVM builds programs that hold CUDA source, to be compiled when they are loaded.  `machine_code`
compiles it on the building machine, if nvcc is there, and `ready_code` gives it to the loader, which then needs no
compiler.
"""

import contextlib
import hashlib
import struct

import tvm_ffi

from tir_kernels.cuda import compile as nvcc
from tir_kernels.cuda.compile import cuda_modules, ready
from tir_kernels.errors import ArtifactError

HEADER = struct.Struct("<32sQ")  # of a piece: the SHA-256 of its source, and its length in bytes


def machine_code(executable, arch: str) -> bytes:
    """Fatbins for `arch` of what is still source in an executable; empty if TVM compiled it, or without nvcc.

    Raises CompileError where nvcc refuses the source.
    """
    compiled_by_tvm = tvm_ffi.get_global_func("ffi.Module.load_from_bytes.cuda", allow_missing=True) is not None
    if compiled_by_tvm or not nvcc.have_nvcc():
        return b""
    pieces = []
    for module in cuda_modules(executable):
        source = module.inspect_source()
        code, _ = nvcc.run_nvcc(source, "fatbin", nvcc.gencode(arch, None))
        pieces += [HEADER.pack(hashlib.sha256(source.encode()).digest(), len(code)), code]
    return b"".join(pieces)


@contextlib.contextmanager
def ready_code(packed: bytes, arch: str):
    """A context in which source in `packed` (of `machine_code`) needs no compiler; the rest is compiled for `arch`.

    Raises ArtifactError for what `machine_code` did not pack.
    """
    pieces, at = {}, 0
    while at < len(packed):
        if at + HEADER.size > len(packed):
            raise ArtifactError("the machine code of the kernels is cut off")
        digest, size = HEADER.unpack_from(packed, at)
        at += HEADER.size + size
        pieces[digest] = packed[at - size : at]
        if len(pieces[digest]) != size:
            raise ArtifactError("the machine code of the kernels is cut off")
    token = ready.set((pieces, arch))
    try:
        yield
    finally:
        ready.reset(token)
