"""Machine code that is saved beside CUDA source.

Without a CUDA driver, TVM builds programs that hold CUDA source, which is compiled when a program is loaded.
`machine_code` compiles the source on the building machine, if nvcc is there.  `ready_code` gives the result to the
loader, which then needs no compiler.
"""

import contextlib
import hashlib
import struct

import tvm_ffi

from tir_kernels.cuda import compile as nvcc
from tir_kernels.cuda.compile import cuda_modules, ready
from tir_kernels.errors import ArtifactError

HEADER = struct.Struct("<32sQ")  # begins a piece: the SHA-256 of its source, and the size of its code in bytes


def machine_code(executable, arch: str) -> bytes:
    """Fatbins for `arch` of the CUDA source in an executable; empty if TVM has compiled that source, or without nvcc.

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
    """A context in which source whose code is in `packed` needs no compiler; other source is compiled for `arch`.

    `packed` is what `machine_code` returned.  Raises ArtifactError if it is cut off.
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
