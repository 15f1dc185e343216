"""Kernels that store their result twice: to the output, and to a second buffer, such as another GPU's memory.

The addresses of the stores are in the kernel already, so a kernel of any template, or one that TVM scheduled, is
rewritten: each store is followed by one of the same value at the same place of the second buffer.
"""

import tvm
import tvm_ffi
from tvm import tirx

STORES = ("tirx.ptx.st", "tirx.ptx.st_vec")  # their first argument is where they store


def with_second_output(kernel: tirx.PrimFunc, output: int) -> tirx.PrimFunc | None:
    """The kernel with one more argument, the last: a buffer like argument `output`, which gets the same elements.

    None where the kernel does anything with this output but store to it, such as adding to it, reading it, or letting
    the copy engine write it.
    """
    first = kernel.params[output]
    stores: list[tirx.Stmt] = []
    tvm_ffi.structural_walk(kernel.body, ((tirx.Evaluate, tirx.BufferStore), stores.append))
    stores = [store for store in stores if _uses(store, first)]
    if not stores or not all(_only_stores(store, first) for store in stores):
        return None
    if sum(_uses(store, first) for store in stores) != _uses(kernel.body, first):
        return None  # it is also read, or something else is made of its address
    second = tirx.Var(f"{first.name}_again", first.ty)

    def twice(store):
        if not _uses(store, first):
            return store
        return tirx.SeqStmt([store, _with(store, first, second)])

    body = tvm_ffi.structural_map(kernel.body, ((tirx.Evaluate, tirx.BufferStore), twice))
    return tirx.PrimFunc([*kernel.params, second], body, kernel.ret_type, kernel.attrs)


def _only_stores(statement, var: tirx.Var) -> bool:
    """Whether a statement that uses a buffer's variable stores to the buffer, and neither reads nor passes it on."""
    if isinstance(statement, tirx.BufferStore):
        return (
            statement.buffer.same_as(var)
            and _uses(statement.value, var) == sum(_uses(index, var) for index in statement.indices) == 0
        )
    call = statement.value
    if not isinstance(call, tvm.ir.Call) or call.op.name not in STORES:
        return False
    where, *rest = call.args
    if not isinstance(where, tvm.ir.Call) or where.op.name != "tirx.address_of":
        return False
    return _uses(where, var) == 1 and not any(_uses(x, var) for x in rest)


def _uses(node, var: tirx.Var) -> int:
    """How often a variable occurs."""
    found: list[tirx.Var] = []
    tvm_ffi.structural_walk(node, (tirx.Var, found.append))
    return sum(other.same_as(var) for other in found)


def _with(node, old: tirx.Var, new: tirx.Var):
    return tvm_ffi.structural_map(node, (tirx.Var, lambda var: new if var.same_as(old) else var))
