"""Rows that are chosen at run time are read by the grouped product that alone reads them, where that is faster."""

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_passes.extensions import NO_EXTENSIONS
from relax_passes.fusion.gathered_rows import GatheredRows
from relax_passes.fusion.matching.segment_problem import match_problem
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.operators.grouped_products import grouped_product
from relax_passes.pipeline import PHASES, Job
from relax_passes.schedule.cpu import cpu_passes
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.fusion.modules import function_of, module_of, run
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.registry import templates_for
from tir_kernels.target import parse_target

op = relax.op
HOPPER, AMPERE = (parse_target(f"cuda -arch={arch}") for arch in ("sm_90a", "sm_80"))


def parameters(dtype="bfloat16", index="int64", m=32768, tokens=4096, n=1024, k=1024):
    specs = {"x": ((tokens, k), dtype), "rows": ((m,), index), "w": ((16, n, k), dtype), "offsets": ((16,), "int32")}
    return [relax.Var(name, relax.TensorType(*spec)) for name, spec in specs.items()]


def apart(params, mode="nan", axis=0):
    x, rows, w, offsets = params
    return module_of(
        params, lambda b: b.emit(grouped_product(b.emit(op.take(x, rows, axis, mode=mode)), w, offsets, "nk"))
    )


def joined(params):
    x, rows, w, offsets = params
    return module_of(params, lambda b: b.emit(grouped_product(x, w, offsets, "nk", rows)))


def rewritten(mod, target=HOPPER):
    return GatheredRows(TemplateChooser(target, templates_for(target)))(mod)


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("mode", ["nan", "fast"])
def test_a_gather_and_its_product_are_one(mode, index):
    params = parameters(index=index)
    tvm.ir.assert_structural_equal(rewritten(apart(params, mode)), joined(params))


def test_the_problem_of_both():
    x, rows, w, offsets = params = parameters(m=512, tokens=100, n=64, k=32)
    match = match_problem(function_of(params, lambda emit: emit(grouped_product(x, w, offsets, "nk", rows))))
    expected = GroupedProblem(512, 64, 32, 16, "bfloat16", gathered_from=100, rows_dtype="int64")
    assert match.problem == expected
    assert all(a.same_as(b) for a, b in zip(match.inputs, (x, w, offsets, rows), strict=True))


def read_twice(params):
    x, rows, w, offsets = params

    def body(b):
        taken = b.emit(op.take(x, rows, 0, mode="nan"))
        return b.emit(op.add(b.emit(grouped_product(taken, w, offsets, "nk")), taken))

    return module_of(params, body)


@pytest.mark.parametrize(
    "mod, target",
    [
        (apart(parameters(), "clip"), HOPPER),  # an index outside means the nearest row
        (apart(parameters("float32")), HOPPER),
        (apart(parameters()), AMPERE),  # no template gathers there
        (apart(parameters(m=16, tokens=8)), HOPPER),  # the copies of few rows cost less than large tiles
        (read_twice(parameters()), HOPPER),
    ],
    ids=["clipped", "float32", "sm_80", "few rows", "read twice"],
)
def test_what_stays_apart(mod, target):
    tvm.ir.assert_structural_equal(rewritten(mod, target), mod)


def test_without_a_template_the_rows_are_gathered_first():
    random = np.random.default_rng(0)
    x, w = random.standard_normal((7, 12)).astype("float32"), random.standard_normal((3, 20, 12)).astype("float32")
    rows, offsets = np.array([6, 0, 7, 3, -1], "int64"), np.array([2, 2, 4], "int32")
    values = x, rows, w, offsets
    params = [relax.Var(n, relax.TensorType(v.shape, str(v.dtype))) for n, v in zip("xrwo", values)]
    with QUICK_LLVM:
        mod = tvm.transform.Sequential(cpu_passes(QUICK_LLVM))(joined(params))
    (out,) = run(mod, *values)
    expected = np.stack([x[6] @ w[0].T, x[0] @ w[0].T, np.full(20, np.nan), x[3] @ w[2].T, np.zeros(20)])
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_rows_in_the_order_of_a_sort_are_read_by_the_product():
    """As experts have them: the order of choices, divided by the choices of a token, in the pipeline of a target."""
    x, _, w, offsets = parameters()
    chosen = relax.Var("chosen", relax.TensorType((32768,), "int64"))

    def body(builder):
        emit = builder.emit
        rows = emit(op.floor_divide(emit(op.argsort(chosen, 0, dtype="int64")), relax.const(8, "int64")))
        is_wrapped = emit(op.less(rows, relax.const(0, "int64")))
        wrapped = emit(op.where(is_wrapped, emit(op.add(rows, relax.const(4096, "int64"))), rows))
        return emit(grouped_product(emit(op.take(x, wrapped, 0, mode="nan")), w, offsets, "nk"))

    mod, chooser = module_of([x, chosen, w, offsets], body), TemplateChooser(HOPPER, templates_for(HOPPER))
    job = Job(HOPPER, None, chooser, None, None, NO_EXTENSIONS, "ieee")
    mod = tvm.transform.Sequential(PHASES["canonicalize_operators"](job))(mod)
    (call,) = (value for value in Bindings(mod["main"]).values.values() if operator(value).startswith("grouped"))
    assert len(call.args) == 4 and call.args[0].same_as(x)
