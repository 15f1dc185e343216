"""Values of expressions that depend on no input of the function.

Small ones of integers are NumPy's (exact_values.py); the others are evaluated together in one LLVM program.
"""

import math

import numpy as np
import tvm
from tvm import relax

from relax_passes.ir.bindings import Bindings, static_shape
from relax_passes.ir.constant_arrays import with_aligned
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.legalizations.exact_values import ExactValues

SMALL = 1 << 20  # elements
PRODUCT = "stof.closed_product"
HALF = ("float16", "bfloat16")


def closed_values(bindings: Bindings, exprs: list[relax.Expr]) -> list[np.ndarray]:
    """The values of closed expressions, each in its own (shape, dtype), but float32 for bfloat16.

    `exprs` are expressions of the function of `bindings` that `ClosedExpressions` calls closed.  Equal expressions
    share one array, however often they are written; callers must not change it.
    """
    exact, values = ExactValues(bindings, SMALL), [bindings.value(expr) for expr in exprs]
    known = {value: array for value in dict.fromkeys(values) if (array := exact.of(value)) is not None}
    unknown = [expr for expr, value in zip(exprs, values) if value not in known]
    results = iter(_run(_program(bindings, unknown)) if unknown else ())
    arrays = [known[value] if value in known else next(results) for value in values]
    owned = {id(array): _owned(array) for array in arrays}
    return [owned[id(array)] for array in arrays]


def _program(bindings: Bindings, exprs) -> tvm.IRModule:
    """A function without parameters that returns the tuple of the expressions; equal ones are computed once."""
    needed, pending = set(), [var for expr in exprs for var in relax.analysis.free_vars(expr)]
    while pending:
        var = pending.pop()
        if var not in needed:
            needed.add(var)
            pending += bindings.reads[var]
    builder, copies = relax.BlockBuilder(), {}
    with closing_blocks(builder), builder.function("main", []):
        with builder.dataflow():
            for var, value in bindings.values.items():
                if var in needed:
                    value = builder.normalize(with_aligned(value, copies))
                    builder.emit_normalized(relax.VarBinding(var, value))
            output = builder.emit_output(relax.Tuple([builder.emit(with_aligned(expr, copies)) for expr in exprs]))
        builder.emit_func_output(output)
    return relax.transform.EliminateCommonSubexpr()(builder.finalize())


def _owned(array: np.ndarray) -> np.ndarray:
    """The array, or a copy where its memory is another's, such as a weight's."""
    array = array.astype(np.float32) if array.dtype.name == "bfloat16" else array
    return np.require(array, requirements=("C", "O", "W"))


def _run(program: tvm.IRModule) -> list[np.ndarray]:
    """The results of a program, one array for those that are one tensor."""
    largest = max(math.prod(static_shape(binding.var) or [1]) for binding in program["main"].body.blocks[0].bindings)
    # Small tensors do not pay for LLVM's optimizer, which takes half of the time.
    target = tvm.target.Target({"kind": "llvm", **({"opt-level": 0} if largest <= SMALL else {})})
    program = relax.transform.LegalizeOps({**LEGALIZATIONS, "relax.matmul": _as_product})(program)
    # Nor do they for checks of arguments, which are most of the code of a small function: all of them are made here.
    with tvm.transform.PassContext(config={"tirx.disable_assert": True}), target:
        machine = relax.VirtualMachine(tvm.compile(program, target=target), tvm.cpu())
    tensors = list(machine["main"]())
    arrays = {tensor: tensor.numpy() for tensor in dict.fromkeys(tensors)}
    return [arrays[tensor] for tensor in tensors]


def _as_product(_builder, call: relax.Call) -> relax.Expr:
    """NumPy's product: unscheduled loops take minutes where a model multiplies its tables by weights."""
    return relax.call_dps_packed(PRODUCT, list(call.args), out_ty=call.ty)


@tvm.register_global_func(PRODUCT, override=True)
def _product(a, b, out) -> None:
    """out = a @ b, half precision accumulated in float32."""
    wide = [x.astype(np.float32) if x.dtype.name in HALF else x for x in (a.numpy(), b.numpy())]
    out.copyfrom(np.matmul(*wide).astype(out.numpy().dtype))
