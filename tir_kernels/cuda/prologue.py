"""What CUDA kernels begin with: buffers of optional arguments, shared memory by its 32-bit address, tensor maps.

These are plain functions that run while a kernel is parsed; call them inside `T.meta_var`.  They name what they make.
"""

from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder


def match_optional(name: str, handle, shape, dtype: str | None, align: int = -1):
    """The buffer of an optional argument, or None where it is absent; `align` is in bytes, -1 for TVM's."""
    return None if handle is None else IRBuilder.name(name, T.match_buffer(handle, shape, dtype, align=align))


def scalar(name: str, value):
    """A register that holds `value`, as an assignment in a kernel's body makes one."""
    made = T.local_scalar(dtype=str(value.ty.dtype)).scalar
    IRBuilder.name(name, made.source)
    T.buffer_store(made.source, value, [0])
    return made


def shared_buffer(size: int, align: int):
    """The CTA's dynamic shared memory of `size` bytes, aligned to `align` bytes."""
    return IRBuilder.name("shared", T.alloc_buffer((size,), "uint8", scope="shared.dyn", align=align))


def address_of(shared):
    """int32 address of a buffer in shared memory."""
    return scalar("base", T.cast(T.cuda.cvta_generic_to_shared(shared.ptr_to([0])), "int32"))


def shared_memory(size: int, align: int):
    """int32 address of the CTA's dynamic shared memory of `size` bytes, aligned to `align` bytes."""
    return address_of(shared_buffer(size, align))


def prefetch_maps(maps) -> None:
    """Start to load maps to where copies look for them; call it while a kernel is parsed."""
    for tensor_map in maps:
        T.evaluate(T.ptx["prefetch.tensormap"](T.address_of(tensor_map)))
