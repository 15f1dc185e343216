"""Memory from the caller instead of the runtime: the blocks that "main" allocates become its last parameters.

Preconditions: memory is planned (StaticPlanBlockMemory), shapes are static.  TVM's own allocator is one pool for the
process.  It reuses a block as soon as the host is done with it, even if a GPU still works on it.  If an engine has
blocks of its own, nothing else writes the memory of its kernels and its CUDA graph as long as the engine lives.
"""

import json
import math

import tvm
from tvm import relax

from relax_passes.ir.bindings import shape_of

MEMORY = "stof.memory"  # module attribute: the blocks' sizes in bytes, a JSON list
STORAGE, PLANNED, UNPLANNED = "relax.memory.alloc_storage", "relax.memory.alloc_tensor", "relax.builtin.alloc_tensor"
KILLS = "relax.memory.kill_storage", "relax.memory.kill_tensor"


@tvm.transform.module_pass(opt_level=0, name="MemoryParameters")
class MemoryParameters:
    """Append a parameter for each planned storage and each tensor outside of the plan: uint8, one dimension.

    Outputs lie in these blocks, so they last until the next run.
    """

    def transform_module(self, mod, _ctx):
        function = mod["main"]
        memory = {}  # variable of a storage, or of a tensor outside of the plan -> parameter
        blocks = []
        for block in function.body.blocks:
            bindings = [_with_memory(binding, memory) for binding in block.bindings]
            blocks.append(relax.BindingBlock([binding for binding in bindings if binding is not None]))
        new = relax.Function(
            [*function.params, *memory.values()],
            relax.SeqExpr(blocks, function.body.body),
            function.ret_ty,
            function.is_pure,
            function.attrs,
        )
        sizes = [shape_of(parameter)[0] for parameter in memory.values()]
        mod = mod.clone()
        mod["main"] = new
        return relax.transform.Normalize()(mod.with_attr(MEMORY, json.dumps(sizes)))


def _with_memory(binding, memory: dict):
    """The binding, with an allocation replaced by a view of a parameter; None if it is no longer needed."""
    call, name = binding.value, _operator(binding.value)
    if name in KILLS:
        return None
    if name == STORAGE:
        memory[binding.var] = _block(len(memory), call.args[0].values[0].value)
        return None
    if name == PLANNED:
        storage, _offset, shape, dtype, _device = call.args  # TVM's plan lets every tensor begin where its storage does
    elif name == UNPLANNED:
        storage, (shape, dtype, _device, _scope) = binding.var, call.args
        bytes_each = tvm.DataType(str(binding.var.ty.dtype)).itemsize
        memory[storage] = _block(len(memory), math.prod(shape_of(binding.var)) * bytes_each)
    else:
        return binding
    view = relax.ExternFunc("runtime.TVMTensorCreateView")
    arguments = memory[storage], shape, dtype, relax.prim_value(0)
    return relax.VarBinding(binding.var, relax.Call(view, arguments, ty_args=[binding.var.ty]))


def _block(number: int, size: int) -> relax.Var:
    return relax.Var(f"memory{number}", relax.TensorType((max(size, 1),), "uint8"))


def _operator(expr) -> str:
    is_operator = isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op)
    return expr.op.name if is_operator else ""
