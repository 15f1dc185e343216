"""Sorts in "main" become this project's operators: which ones, in which steps, with the numbers of PyTorch."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.sorting.sorts_to_kernels import SortsToKernels
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.ir.operators.sorting import SORTING, problem_of_sorting
from relax_passes.legalizations import LEGALIZATIONS
from relax_passes.report_rows import segment_rows
from tests.relax_passes.fusion.modules import module_of, run
from tir_kernels.fusion.registry import templates_for
from tir_kernels.fusion.sorting.problem import MergeProblem, SortProblem
from tir_kernels.scatter import scatter_permuted
from tir_kernels.target import parse_target

op = relax.op
CUDA = parse_target("cuda -arch=sm_80")


def variable(*shape, dtype="float32"):
    return relax.Var("x", relax.TensorType(shape, dtype))


def key(emit, x, dtype="float64", limit=None):
    """The frontend's: a wider dtype, inf for NaN, and the largest number for inf."""
    wide = emit(op.astype(x, dtype))
    limit = float(np.finfo(dtype).max) if limit is None else limit
    bounded = emit(op.minimum(wide, relax.const(limit, dtype)))
    return emit(op.where(emit(op.isnan(wide)), relax.const(np.inf, dtype), bounded))


def problems(mod) -> list:
    calls = [value for value in Bindings(mod["main"]).values.values() if operator(value) in SORTING]
    return [problem_of_sorting(call) for call in calls]


def rewritten(x, body) -> tvm.IRModule:
    return SortsToKernels(CUDA)(module_of([x], body))


def evaluated(mod, *inputs):
    """What the operators' definitions give on this CPU."""
    return run(relax.transform.LegalizeOps(LEGALIZATIONS)(mod), *inputs)


def test_topk_of_keys_gives_values_and_places():
    def body(builder):
        emit, x = builder.emit, given
        order = emit(op.topk(key(emit, x), 3, -1, ret_type="indices", largest=True, dtype="int64"))
        return emit(relax.Tuple([emit(op.gather_elements(x, order, 1)), order]))

    given = variable(5, 9)
    mod = rewritten(given, body)
    assert problems(mod) == [SortProblem(5, 9, 9, 3, "float32", True, "int64")]
    assert not {"topk", "gather_elements", "where"} & {operator(v) for v in Bindings(mod["main"]).values.values()}
    x = np.random.default_rng(0).integers(0, 5, (5, 9)).astype("float32")
    x[0, 3] = x[2, 8] = np.nan
    values, order = evaluated(mod, x)
    expected = torch.from_numpy(x).sort(dim=1, descending=True, stable=True)
    np.testing.assert_array_equal(values, expected.values[:, :3])
    np.testing.assert_array_equal(order, expected.indices[:, :3])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_any_axis(axis):
    given = variable(3, 4, 5, dtype="int64")
    mod = rewritten(given, lambda builder: builder.emit(op.argsort(given, axis, True, "int32")))
    (problem,) = problems(mod)
    assert problem == SortProblem(60 // (3, 4, 5)[axis], *[(3, 4, 5)[axis]] * 3, "int64", True, "int32")
    x = np.random.default_rng(axis).integers(0, 4, (3, 4, 5))
    (order,) = evaluated(mod, x)
    np.testing.assert_array_equal(order, np.argsort(-x, axis=axis, kind="stable"))


@pytest.mark.parametrize("returns", ["both", "values", "indices"])
def test_results_of_topk(returns):
    given = variable(2, 7, dtype="int32")

    def body(builder):
        call = builder.emit(op.topk(given, 4, 1, ret_type=returns, largest=False, dtype="int32"))
        if returns != "both":
            return call
        return builder.emit(relax.Tuple([builder.emit(relax.TupleGetItem(call, i)) for i in range(2)]))

    mod = rewritten(given, body)
    assert problems(mod) == [SortProblem(2, 7, 7, 4, "int32", False, "int32")]
    x = np.array([[5, 1, 1, 0, 9, 0, 2], [3, 3, 3, 3, 3, 3, 3]], "int32")
    order = np.argsort(x, axis=1, kind="stable")[:, :4]
    values = np.take_along_axis(x, order, 1)
    for actual, expected in zip(
        evaluated(mod, x), {"both": [values, order], "values": [values], "indices": [order]}[returns], strict=True
    ):
        np.testing.assert_array_equal(actual, expected)


def test_sort_gives_values():
    given = variable(3, 6, dtype="int32")
    mod = rewritten(given, lambda builder: builder.emit(op.sort(given, 1, True)))
    x = np.random.default_rng(0).integers(0, 9, (3, 6)).astype("int32")
    (values,) = evaluated(mod, x)
    np.testing.assert_array_equal(values, -np.sort(-x, axis=1))


def test_long_rows_are_sorted_in_runs_and_merged():
    given = variable(40000, dtype="int64")
    mod = rewritten(given, lambda builder: builder.emit(op.argsort(given, 0, False, "int64")))
    assert problems(mod) == [
        SortProblem(1, 40000, 1024, 1024, "int64", False, "int32"),
        MergeProblem(1, 40000, 1024, 32768, "int64", False, "int32"),
        MergeProblem(1, 40000, 32768, 40000, "int64", False, "int64"),
    ]


def test_few_of_long_rows_are_kept_of_each_run():
    given = variable(4, 50257, dtype="float16")
    top = lambda builder: builder.emit(op.topk(given, 50, -1, ret_type="indices", largest=True, dtype="int64"))
    assert problems(rewritten(given, top)) == [
        SortProblem(4, 50257, 1024, 50, "float16", True, "int32"),
        MergeProblem(4, 49 * 50 + 50, 50, 50, "float16", True, "int32"),
        MergeProblem(4, 100, 50, 50, "float16", True, "int64"),
    ]


def test_numbers_of_merged_runs():
    given = variable(2, 2300, dtype="int32")
    mod = rewritten(given, lambda builder: builder.emit(op.topk(given, 5, 1, ret_type="both", dtype="int32")))
    assert [type(problem) for problem in problems(mod)] == [SortProblem, MergeProblem]
    x = np.random.default_rng(0).integers(0, 300, (2, 2300)).astype("int32")
    order = np.argsort(-x, axis=1, kind="stable")[:, :5]
    values, places = evaluated(mod, x)
    np.testing.assert_array_equal(places, order)
    np.testing.assert_array_equal(values, np.take_along_axis(x, order, 1))


def inverse(n, numbers, dtype="int64", descending=False):
    given = variable(n, dtype="int64")

    def body(builder):
        order = builder.emit(op.argsort(given, 0, descending, dtype))
        name = builder.add_func(scatter_permuted(n, 1, dtype, dtype), "scatter_permuted")
        update = builder.emit(op.reshape(relax.const(np.asarray(numbers, dtype), dtype), (n, 1)))
        places = builder.emit(relax.call_tir(name, [order, update], relax.TensorType((n, 1), dtype)))
        return builder.emit(relax.Tuple([order, places]))

    return given, body


@pytest.mark.parametrize("n", [6, 1500])
def test_the_inverse_of_an_order_is_an_output_of_the_sort(n):
    mod = rewritten(*inverse(n, range(n)))
    assert problems(mod)[-1].ranks and len(mod.functions) == 1
    if n == 6:
        x = np.array([3, 1, 2, 1, 0, 3])
        order, places = evaluated(mod, x)
        np.testing.assert_array_equal(places[order, 0], np.arange(n))


def test_what_writes_other_numbers_at_the_places_stays():
    mod = rewritten(*inverse(6, [0, 1, 2, 3, 5, 4]))
    assert not problems(mod)[0].ranks and len(mod.functions) == 2


def test_other_values_are_gathered():
    x = variable(3, 6, dtype="int32")
    other = relax.Var("y", x.ty)

    def body(builder):
        order = builder.emit(op.argsort(x, 1, False, "int64"))
        return builder.emit(op.gather_elements(other, order, 1))

    names = [operator(v) for v in Bindings(SortsToKernels(CUDA)(module_of([x, other], body))["main"]).values.values()]
    assert "gather_elements" in names and "sort_runs" in names


def test_a_smaller_bound_is_no_key():
    """Elements above the bound are equal in the model, and are not among themselves."""
    given = variable(4, 8)

    def body(builder):
        return builder.emit(op.argsort(key(builder.emit, given, limit=3.0), 1, False, "int64"))

    assert problems(rewritten(given, body)) == [SortProblem(4, 8, 8, 8, "float64")]


def test_a_narrowing_cast_is_sorted_as_it_is():
    given = variable(4, 8, dtype="int64")
    mod = rewritten(
        given, lambda builder: builder.emit(op.argsort(builder.emit(op.astype(given, "int8")), 1, False, "int64"))
    )
    assert [problem.dtype for problem in problems(mod)] == ["int8"]


@pytest.mark.parametrize("dtype", ["uint64", "float8_e4m3fn"])
def test_dtypes_without_a_kernel_stay(dtype):
    given = variable(4, 8, dtype=dtype)
    mod = module_of([given], lambda builder: builder.emit(op.argsort(given, 1, False, "int64")))
    tvm.ir.assert_structural_equal(SortsToKernels(CUDA)(mod), mod)


def test_sorts_of_constants_and_of_nothing_stay():
    constant = relax.const(np.arange(6.0, dtype="float32"))
    given = variable(0, 3)
    body = lambda builder: builder.emit(
        relax.Tuple([builder.emit(op.argsort(constant, 0, False, "int64")), builder.emit(op.argsort(given, 1))])
    )
    mod = module_of([given], body)
    tvm.ir.assert_structural_equal(SortsToKernels(CUDA)(mod), mod)


def test_each_becomes_a_kernel_of_its_own():
    given = variable(2, 3000, dtype="float16")

    def body(builder):
        emit = builder.emit
        order = emit(op.topk(key(emit, given, "float32"), 4, -1, ret_type="indices", dtype="int64"))
        values = emit(op.gather_elements(given, order, 1))
        return emit(relax.Tuple([emit(op.multiply(values, relax.const(2.0, "float16"))), order]))

    chooser = TemplateChooser(CUDA, templates_for(CUDA))
    mod = LowerSegments(chooser)(PartitionSegments(InitialScheme(chooser))(rewritten(given, body)))
    assert [row.kernel for row in segment_rows(mod)] == ["sort", "sort-merge", "group"]
    assert {name.name_hint for name in mod.functions} == {"main", "fused_sort", "fused_sort_merge", "fused_group"}


def test_a_cast_that_makes_numbers_equal_is_sorted_as_it_is():
    """2^60 and 2^60 + 1 are the same float64, so the first of them comes first."""
    x = variable(6, dtype="int64")

    def body(builder):
        return builder.emit(op.argsort(builder.emit(op.astype(x, "float64")), 0, False, dtype="int64"))

    mod = rewritten(x, body)
    assert [problem.dtype for problem in problems(mod)] == ["float64"]
    given = torch.tensor([2**60 + 3, 2**60 + 1, 2**60, 2**60 + 2, 5, 2**60 + 1])
    (order,) = evaluated(mod, given.numpy())
    assert order.tolist() == given.double().argsort(stable=True).tolist()


@pytest.mark.parametrize("narrow, wide", [("int32", "float64"), ("int16", "float32"), ("int8", "float16")])
def test_a_cast_that_keeps_all_numbers_is_left_out(narrow, wide):
    x = variable(6, dtype=narrow)
    mod = rewritten(x, lambda b: b.emit(op.argsort(b.emit(op.astype(x, wide)), 0, False, dtype="int64")))
    assert [problem.dtype for problem in problems(mod)] == [narrow]


def test_more_than_there_are_is_left_as_it_is():
    x = variable(3, 5)
    assert not problems(rewritten(x, lambda b: b.emit(op.topk(x, 6, -1, ret_type="indices", dtype="int64"))))
