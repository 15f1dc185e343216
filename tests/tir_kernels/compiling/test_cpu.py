"""Floats that are bound to variables: on the stack, of the same value, in little time, and behind their guards."""

import time

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import s_tir, te, tirx
from tvm.ir import TensorLoad

from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels.compiling.cpu import KeepOnStack, cpu_pipeline_name

LENGTH = 48


def chained(x, depth: int):
    """x -> x * x - x / 2, so often, each result bound to a variable that is read three times."""
    for level in range(depth):
        variable = tirx.Var(f"v{level}", "float32")
        x = tirx.Let(variable, x, variable * variable - variable * 0.5)
    return x


def run(value, vectorised: bool = False):
    """(y, seconds to compile) of y[i] = value(x[i], i)."""
    x = te.placeholder((LENGTH,), "float32", name="x")
    y = te.compute((LENGTH,), lambda i: value(x, i), name="y")
    schedule = s_tir.Schedule(te.create_prim_func([x, y]))
    if vectorised:
        _, lane = schedule.split(schedule.get_loops(schedule.get_sblock("y"))[0], [None, 16])
        schedule.vectorize(lane)
    mod = tvm.IRModule({"main": schedule.mod["main"].with_attr("global_symbol", "main")})
    started = time.process_time()
    library = tvm.compile(mod, target=QUICK_LLVM, tir_pipeline=cpu_pipeline_name)
    seconds = time.process_time() - started
    given = np.linspace(-1, 1, LENGTH, dtype="float32")
    result = tvm.runtime.tensor(np.full(LENGTH, np.nan, "float32"))
    library["main"](tvm.runtime.tensor(given), result)
    return given, result.numpy(), seconds


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_chain_of_variables_compiles_at_once(vectorised):
    """Written out, it would have 3**40 terms."""
    given, got, seconds = run(lambda x, i: chained(x[i], 40), vectorised)
    expected = given.astype("float64")
    for _ in range(40):
        expected = expected * expected - expected * 0.5
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    assert seconds < 5


@pytest.mark.parametrize("vectorised", [False, True])
def test_a_variable_in_two_places_and_of_another(vectorised):
    def value(x, i):
        a, b = tirx.Var("a", "float32"), tirx.Var("b", "float32")
        return tirx.Let(a, x[i] + 1.0, tirx.Let(b, a * a, b * a) + a)

    given, got, _ = run(value, vectorised)
    np.testing.assert_allclose(got, (given + 1) ** 3 + given + 1, rtol=1e-5, atol=1e-6)


def test_two_statements_share_an_expression():
    a, x, y = tirx.Var("a", "float32"), *(tirx.decl_buffer((2,), "float32", name) for name in "xy")
    shared = tirx.Let(a, x[0] + 1.0, a * a)
    stores = [tirx.BufferStore(y, shared, [0]), tirx.BufferStore(y, shared + 1.0, [1])]
    function = tirx.PrimFunc([x, y], tirx.SeqStmt(stores)).with_attr("s_tir", True)
    mod = KeepOnStack()(tvm.IRModule({"main": function}))
    stored: list = []
    for part in mod["main"].body.seq:
        if isinstance(part, tirx.BufferStore):
            loads: list = []
            tvm_ffi.structural_walk(part.value, (TensorLoad, lambda load: loads.append(load.source)), order="post")
            assert all(any(source.same_as(known) for known in [x, *stored]) for source in loads)
            stored.append(part.buffer)


def test_what_is_guarded_stays_guarded():
    """A load out of bounds is not made: it would be 2**40 elements away."""

    def value(x, i):
        far = tirx.Var("far", "float32")
        loaded = tirx.Let(far, x[i.astype("int64") * (1 << 40)], far * far)
        return tirx.if_then_else(i < 1, loaded, tirx.const(7.0, "float32"))

    given, got, _ = run(value)
    assert got[0] == given[0] ** 2 and (got[1:] == 7).all()


def test_integers_and_functions_without_variables_are_unchanged():
    x = te.placeholder((LENGTH,), "float32", name="x")
    function = te.create_prim_func([x, te.compute((LENGTH,), lambda i: x[i] * 2.0)])
    mod = tvm.IRModule({"main": function})
    assert KeepOnStack()(mod).same_as(mod)
