"""The indices of TensorIR functions after all loops of a block are fused and buffers are flat, each evaluated.

Code for CPUs and for GPUs is generated from this form.
"""

import ast
import math
from types import SimpleNamespace

import tvm
from tvm import relax, s_tir, tirx

FUSION = [
    relax.transform.LegalizeOps(),
    relax.transform.AnnotateTIROpPattern(),
    relax.transform.FuseOps(),
    relax.transform.FuseTIR(),
]
LOWERING = [
    s_tir.transform.ConvertBlocksToOpaque(),
    s_tir.transform.LowerOpaqueBlock(),
    tirx.transform.FlattenBuffer(),
]


class Buffer:
    """A buffer of `size` elements; an access outside is an IndexError."""

    def __init__(self, size):
        self.size, self.accesses = size, 0

    def view(self, _size):
        return self

    def __getitem__(self, index):
        if not 0 <= index < self.size:
            raise IndexError(f"element {index} of {self.size}")
        self.accesses += 1
        return 1

    def __setitem__(self, index, _value):
        self[index]


class _Branches(ast.NodeTransformer):
    """`T.if_then_else` evaluates one branch; `T.Select` both."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if ast.unparse(node.func) == "T.if_then_else":
            return ast.copy_location(ast.IfExp(*node.args), node)
        return node


def accesses(mod: tvm.IRModule) -> int:
    """How many elements the injective functions of a Relax module read and write; IndexError for one outside."""
    mod = tvm.ir.transform.Sequential(FUSION)(mod)
    return sum(_accesses(f) for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))


def _accesses(function) -> int:
    schedule = s_tir.Schedule(function.with_attr("global_symbol", "main"))
    for block in schedule.get_child_blocks(schedule.get_sblock("root")):
        if schedule.get_consumers(block):
            schedule.compute_inline(block)
        else:
            schedule.fuse(*schedule.get_loops(block))
    script = tvm.ir.transform.Sequential(LOWERING)(schedule.mod)["main"].script()
    (definition,) = [x for x in ast.parse(script).body if isinstance(x, ast.FunctionDef)]
    scope = {"T": _script()}
    buffers = [eval(ast.unparse(argument.annotation), scope) for argument in definition.args.args]
    definition.decorator_list, definition.name = [], "run"
    for argument in definition.args.args:
        argument.annotation = None
    exec(compile(ast.fix_missing_locations(_Branches().visit(ast.Module([definition], []))), "<script>", "exec"), scope)
    scope["run"](*buffers)
    return sum(buffer.accesses for buffer in buffers)


def _script():
    """What the printed functions use of TVMScript, on Python numbers."""
    number = lambda x: x
    names = ("int64", "int32", "float32", "bool", "func_attr")
    return SimpleNamespace(
        **dict.fromkeys(names, number),
        **{"Cast": lambda _, x: x, "Select": lambda c, a, b: a if c else b, "min": min, "max": max},
        Buffer=lambda shape, _dtype: Buffer(math.prod(shape)),
        **{"And": lambda a, b: a and b, "Add": lambda a, b: a + b},
    )
