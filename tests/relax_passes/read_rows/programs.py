"""Small modules whose rows are selected, the rows of their products, and what they compute on this CPU."""

import math

import numpy as np
import tvm
from tvm import relax

from relax_passes.attention.composite import match_attention
from relax_passes.ir.bindings import Bindings, operator, shape_of
from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.read_rows.compute_read_rows import ComputeReadRows
from tests.models.quick_llvm import QUICK_LLVM, run_linked

op = relax.op
B, S, H = 2, 6, 8


def weight(*shape, seed=0) -> relax.Expr:
    return relax.const((np.random.default_rng([seed, *shape]).standard_normal(shape) / 4).astype("float32"))


def variable(name, *shape, dtype="float32") -> relax.Var:
    return relax.Var(name, relax.TensorType(shape, dtype))


def module(body, *parameters) -> tvm.IRModule:
    """A module of one dataflow block, whose result is what `body(emit, *parameters)` returns."""
    builder = relax.BlockBuilder()
    with builder.function("main", list(parameters)):
        with builder.dataflow():
            output = builder.emit_output(body(builder.emit, *parameters))
        builder.emit_func_output(output)
    return relax.transform.CanonicalizeBindings()(builder.finalize())


def product_rows(mod) -> list[int]:
    """How many rows each product has, in all batch entries; an attention has its queries."""
    found = []
    for value in Bindings(mod["main"]).values.values():
        if operator(value) == "matmul":
            found.append(math.prod(shape_of(value)[:-1]))
        elif (call := match_attention(mod, value)) is not None:
            found.append(shape_of(call.q)[2])
    return found


def computed(mod, inputs: dict) -> np.ndarray:
    """The result for inputs by the names of parameters."""
    with QUICK_LLVM:
        machine = run_linked(tvm.compile(relax.transform.LegalizeOps(LEGALIZATIONS)(mod), QUICK_LLVM))
    arguments = [tvm.runtime.tensor(inputs[parameter.name]) for parameter in mod["main"].params]
    return machine["main"](*arguments).numpy()


def random_inputs(mod, seed: int = 0, below: int = S) -> dict:
    """Random floats, and integers from 0 to below - 1."""
    numbers = np.random.default_rng(seed)
    return {
        x.name: numbers.integers(0, below, shape_of(x)).astype(str(x.ty.dtype))
        if "int" in str(x.ty.dtype)
        else numbers.standard_normal(shape_of(x)).astype(str(x.ty.dtype))
        for x in mod["main"].params
    }


def narrowed(mod) -> tvm.IRModule:
    """The module after the pass, which gives the same result."""
    after = ComputeReadRows()(mod)
    inputs = random_inputs(mod)
    np.testing.assert_allclose(computed(after, inputs), computed(mod, inputs), rtol=2e-5, atol=2e-5)
    return after
