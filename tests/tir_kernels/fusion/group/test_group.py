"""The CUDA kernel of elementwise groups: its generated CUDA run on the CPU against PyTorch, and what it refuses."""

import re

import pytest
import torch
import tvm
from tvm import te

from tests.gpu.group_cases import (
    Builder,
    GroupCase,
    and_transposed,
    class_token,
    columns_of,
    counted,
    depthwise,
    every_operator,
    gated_halves,
    gathered,
    interleaved_rotation,
    masked,
    modulated,
    normalized,
    packed_rotation,
    padded_rows,
    partial_rotation,
    pooled,
    read_of_parts,
    reordered,
    sorted_rows,
    transposed,
    unfolded,
    weighted_sum,
    windows,
)
from tests.gpu.sources import source as cuda_of
from tests.models.quick_llvm import QUICK_LLVM
from tests.tir_kernels.fusion.group.group_emulation import SM_80, assert_close, assert_right, emulate, expected
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.errors import InputError
from tir_kernels.fusion.group import group as group_cuda
from tir_kernels.fusion.group.group import GroupConfig
from tir_kernels.fusion.group.problem import GroupProblem, Tensor, Value
from tir_kernels.fusion.problem import RowProblem
from tir_kernels.problems import group as group_kind

LOADS = re.compile(r" tvm_builtin_ptx_ld_vec_global_nc_(v\d)_b32\(.*&\(source(\d)_ptr")
SINGLE = re.compile(r"(?<!&\()source(\d)_ptr\[")
SMALL = {"batch": 1, "length": 5, "heads": 2, "kv_heads": 1}

CASES = {
    "rotation": packed_rotation(**SMALL, dim=16),
    "rotation, bfloat16, odd halves": packed_rotation("bfloat16", **SMALL, dim=24, table="bfloat16"),
    "rotation, float32": packed_rotation("float32", **SMALL, dim=16),
    "rotation, norm of heads": packed_rotation(**SMALL, dim=32, norms="head"),
    "rotation, norm of rows": packed_rotation(**SMALL, dim=32, norms="row"),
    "partial rotation": partial_rotation(dim=32),
    "partial rotation, ragged": partial_rotation("bfloat16", dim=32, turned=12),
    "interleaved rotation": interleaved_rotation(dim=16),
    "interleaved rotation, norm of rows": interleaved_rotation("bfloat16", dim=16, is_normed=True),
    "interleaved rotation, float32": interleaved_rotation("float32", dim=16),
    "interleaved rotation, doubled tables": interleaved_rotation("bfloat16", dim=16, is_normed=True, doubled=True),
    "interleaved rotation, float32, doubled tables": interleaved_rotation("float32", dim=16, doubled=True),
    "interleaved rotation, ragged": interleaved_rotation(dim=12),
    "gated halves": gated_halves(40, m=7),
    "gated halves, ragged": gated_halves(13, "bfloat16", "silu", m=7),
    "gated halves, interleaved": gated_halves(24, activation="gelu_tanh", interleaved=True, m=7),
    "class token": class_token(24, 4),
    "class token, ragged": class_token(13, 4, "bfloat16"),
    "transposed": transposed((2, 5, 3, 16)),
    "transposed matrix": transposed((2, 24, 40), (0, 2, 1)),
    "transposed matrix, bfloat16, two outer axes": transposed((2, 16, 3, 72), (3, 0, 2, 1), "bfloat16"),
    "transposed matrix, float32": transposed((1, 40, 64), (0, 2, 1), "float32"),
    "transposed matrix, not by eight": transposed((2, 24, 13), (0, 2, 1)),
    "sum of a matrix and its transposition": and_transposed(),
    "gathered": gathered(24, 16, dtype="float16", index="int32"),
    "gathered, int64": gathered(16, 8, "bfloat16"),
    "transposed, one row": transposed((1, 3, 5), (2, 0, 1), "float32"),
    "heads": transposed((2, 5, 3, 16), (0, 2, 1, 3)),
    "gathered from what is joined": read_of_parts(),
    "gathered from what is joined, float16": read_of_parts(dtype="float16", places=16),
    "gathered from what is padded": read_of_parts(joined=False),
    "at places of what is joined": read_of_parts("rows", index="int32"),
    "at places of what is padded": read_of_parts("rows", joined=False),
    "rows of a convolution": padded_rows(16, 9),
    "rows of a convolution, ragged": padded_rows(3, 11, 5, 1, "float32"),
    "windows": windows(1, 5, 16, 3),
    "windows, one row for each": windows(1, 4, 16, 2, "bfloat16"),
    "depthwise": depthwise(5, 4, c=16),
    "depthwise, strided, odd channels": depthwise(5, 6, n=1, c=13, stride=2, dtype="bfloat16"),
    "depthwise, one axis, even": depthwise(11, c=24, kernel=4),
    "unfolded": unfolded(8, 13, 4, 3),
    "unfolded, ragged": unfolded(3, 11, 3, 2, "bfloat16"),
    "modulated, rms": modulated(40, "bfloat16", "rms_norm", 3),
    "modulated, float32": modulated(24, "float32", m=3),
    "rows": sorted_rows(5, 3, 24),
    "rows, odd": sorted_rows(5, 3, 13, "float32", index="int32"),
    "reordered tokens": reordered(40, 5),
    "weighted sum": weighted_sum(5, 3, 24, "bfloat16"),
    "weighted sum, normed": weighted_sum(5, 3, 24, "bfloat16", normed=True),
    "weighted sum, odd": weighted_sum(4, 2, 13, "float32", index="int32"),
    "normalized": normalized(5, 3, "bfloat16"),
    "normalized, vectors": normalized(4, 8),
    "columns": columns_of(),
    "masked": masked(n=16),
    "masked, ragged": masked("bfloat16", 5),
    **{f"every operator, {dtype}": every_operator(dtype) for dtype in ("float16", "bfloat16", "float32")},
}


@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_computes_what_pytorch_computes(name, tmp_path):
    assert_right(CASES[name], tmp_path)


@needs_gxx
@pytest.mark.parametrize(("last", "dtype"), [(2, "float16"), (3, "bfloat16"), (5, "float32")])
def test_rows_of_a_norm_over_a_last_axis_that_holds_no_vector(last, dtype, tmp_path):
    axes = ((4, 8, last), dtype), ((last,), dtype), ((8, 1), dtype)
    b = Builder(((4, 8 * last), dtype), ((8 * last,), dtype), *axes)
    x = b.reshape(b.norm("rms_norm", 0, 1), 4, 8, last)
    assert_right(b.problem(b.add("add", b.add("multiply", b.add("multiply", x, 2), 3), 4)), tmp_path)


OTHER_ROWS = {
    "rolled": lambda b, x: (x, b.add("roll", x, shape=b.of(x).shape, numbers=(1, 1))),
    "flipped": lambda b, x: (x, b.add("take", x, shape=b.of(x).shape, numbers=(1, 3, -1))),
    "cut": lambda b, x: (b.cut(x, 1, 0, 2), b.cut(x, 1, 2, 4)),
    "permuted": lambda b, x: (b.permute(x, 1, 0, 2), x),
    "in another order": lambda b, x: (b.reshape(b.permute(x, 1, 0, 2), 16, 16), b.reshape(x, 16, 16)),
    "padded": lambda b, x: (b.pad(x, 0.0, (0, 0), (1, 0), (0, 0)), b.pad(x, 0.0, (0, 0), (0, 1), (0, 0))),
    "broadcast": lambda b, x: (x, b.add("add", b.cut(x, 1, 0, 1), b.cut(0, 1, 0, 4))),
}


@needs_gxx
@pytest.mark.parametrize("name", OTHER_ROWS)
def test_results_of_one_shape_that_read_other_rows_of_a_norm(name, tmp_path):
    b = Builder(((4, 4, 16), "float16"))
    assert_right(b.problem(*OTHER_ROWS[name](b, b.norm("layer_norm", 0))), tmp_path)


ROWS = modulated(520, m=3)


@needs_gxx
@pytest.mark.parametrize("config", group_cuda.configs(ROWS, SM_80), ids=lambda config: config.label)
def test_every_configuration_of_a_norm(config, tmp_path):
    assert_right(ROWS, tmp_path, config)


DEFINED = {
    "rows": sorted_rows(5, 3, 8, "float32"),
    "weighted sum": weighted_sum(4, 2, 8, "float32"),
    "weighted sum, missing": weighted_sum(4, 2, 8, "float32", is_missing=1),
    "normalized": normalized(4, 5, "float32"),
    "columns": columns_of(dtype="float32"),
    "counts": counted(5, 40),
    "sums": pooled(2, 3, 40, "float32"),
}


def test_definitions_compute_what_pytorch_computes():
    """Tensor expressions on LLVM; a sum of all elements and extrema of integers among them."""
    b = Builder(((6,), "int64"), ((4,), "float32"))
    least = b.add("minimum", 0, b.number(2, "int64"))
    whole = b.add("sum", b.cast(1, "float32"), shape=(), dtype="float32", numbers=(0,))
    problems = {**DEFINED, "numbers": b.problem(least, whole)}
    functions = {name: te.create_prim_func(group_kind.tensors(problem)) for name, problem in problems.items()}
    named = {name.replace(", ", "_").replace(" ", "_"): function for name, function in functions.items()}
    module = tvm.IRModule({name: function.with_attr("global_symbol", name) for name, function in named.items()})
    with QUICK_LLVM:
        program = tvm.compile(module, target=QUICK_LLVM)
    for symbol, problem in zip(named, problems.values()):
        inputs = GroupCase("", problem, GroupConfig(256, 1)).make_inputs(0, "cpu")
        outputs = [torch.empty(shape, dtype=getattr(torch, dtype)) for shape, dtype in problem.outputs]
        program[symbol](*map(tvm.runtime.from_dlpack, (*inputs, *outputs)))
        for actual, right in zip(outputs, group_kind.reference(problem, inputs, torch), strict=True):
            torch.testing.assert_close(actual, right, rtol=1e-5, atol=1e-5, equal_nan=True)


@needs_gxx
def test_rows_outside_are_nan(tmp_path):
    """Or the nearest row, as the value says."""
    for is_missing in (0, 1):
        problem = sorted_rows(4, 1, 16, "float32", is_missing)
        x, places = torch.randn(4, 16), torch.tensor([-1, 3, 4, 2**40])
        (folder := tmp_path / str(is_missing)).mkdir()
        config = group_cuda.configs(problem, SM_80)[0]
        (found,) = emulate(problem, config, [x, places], folder)
        nearest = x[[0, 3, 3, 3]]
        right = torch.where((places == 3)[:, None], nearest, torch.nan) if is_missing else nearest
        torch.testing.assert_close(found, right, rtol=0, atol=0, equal_nan=True)


def loads(problem) -> tuple[list[tuple[str, str]], list[str]]:
    """What a thread loads of the sources: (registers, source) of each vector, and the source of each single element."""
    text = cuda_of(group_cuda, problem, group_cuda.configs(problem, SM_80)[0])
    return LOADS.findall(text), SINGLE.findall(text)


def test_pairs_are_loaded_in_vectors():
    """What the norm's statistics, elements and their partners read is one vector; a table of four pairs is half one."""
    table = [("v2", "1"), ("v2", "2")]
    normed = interleaved_rotation("bfloat16", 128, is_normed=True)
    assert loads(interleaved_rotation("bfloat16")) == ([("v4", "0"), *table], [])
    assert loads(normed) == ([("v4", "0"), ("v4", "3"), *table], [])
    assert sorted(loads(interleaved_rotation(doubled=True))[0]) == [("v4", number) for number in "012"]
    assert loads(gated_halves(24, interleaved=True)) == ([("v4", "0")] * 2, [])


def test_what_lies_in_many_vectors_is_loaded_element_by_element():
    """Every third element, and pairs whose rows begin at no multiple of two."""
    b = Builder(((4, 48), "float16"))
    assert loads(b.problem(b.add("negative", b.cut(0, 1, 0, 48, 3)))) == ([], ["0"] * 8)
    b = Builder(((3, 17), "float16"))
    swapped = b.concat(-1, *(b.reshape(b.cut(0, 1, i, 15 + i, 2), 3, 8, 1) for i in (1, 0)))
    assert loads(b.problem(swapped)) == ([], ["0"] * 16)


def test_rows_of_a_norm_need_threads_enough():
    labels = lambda problem: [config.label for config in group_cuda.configs(problem, SM_80)]
    assert labels(gated_halves(40)) == ["256 threads 1 vectors", "128 threads 1 vectors"]
    assert labels(ROWS)[0] == "256 threads 1 vectors" and len(labels(ROWS)) == 5
    assert labels(modulated(8192)) == ["256 threads 4 vectors", "512 threads 4 vectors"]
    assert labels(modulated(32768, m=1)) == ["1024 threads 4 vectors"]


@needs_gxx
def test_booleans_integers_and_one_result_twice(tmp_path):
    b = Builder(((3, 11), "float16"), ((3, 11), "int32"), ((11,), "int64"))
    positive = b.add("greater", 0, b.number(0.0))
    total = b.add("add", b.cast(1, "int64"), 2)
    least = b.add("minimum", total, b.number(2, "int64"))
    assert_right(b.problem(positive, least, least), tmp_path)


@needs_gxx
def test_a_result_of_shape_nothing(tmp_path):
    b = Builder(((1,), "float32"), ((1, 1), "float32"))
    assert_right(b.problem(b.reshape(b.add("multiply", 0, 1))), tmp_path)


def of_numbers_that_are_not_finite():
    """NaN stays NaN in extrema and clip, compares with nothing, and comes of inf - inf and 0 * inf."""
    b = Builder(((8,), "float32"), ((8,), "float32"))
    zero = b.number(0.0, "float32")
    floats = [b.add("maximum", 0, 1), b.add("minimum", 0, 1), b.add("clip", 0, numbers=(-1.0, 1.0))]
    floats += [b.add("relu", 0), b.add("subtract", 0, 0), b.add("multiply", 0, zero), b.add("divide", zero, 0)]
    floats += [b.add("subtract", b.add("add", 0, 1), 1), b.add("abs", 0), b.add("negative", 0)]
    same = [b.add(name, 0, 0) for name in ("equal", "not_equal", "less_equal", "greater_equal")]
    two = [b.add(name, 0, 1) for name in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")]
    booleans = same + two + [b.add("logical_not", x) for x in two]
    one, none = b.number(1.0, "float32"), b.number(0.0, "float32")
    rows = [b.reshape(x, 1, 8) for x in floats + [b.add("where", x, one, none) for x in booleans]]
    return b.problem(b.concat(0, *rows[:14]), b.concat(0, *rows[14:]))


@needs_gxx
def test_numbers_that_are_not_finite(tmp_path):
    problem = of_numbers_that_are_not_finite()
    nan, inf = float("nan"), float("inf")
    inputs = [torch.tensor([nan, 1, nan, inf, -inf, 0, -0.0, 3]), torch.tensor([1, nan, nan, nan, 2, -0.0, 0, -inf])]
    found = emulate(problem, group_cuda.configs(problem, SM_80)[0], inputs, tmp_path)
    for actual, right in zip(found, expected(problem, inputs)):
        torch.testing.assert_close(actual.double(), right, equal_nan=True, rtol=0, atol=0)


@needs_gxx
def test_a_filling_that_only_some_lanes_see_and_a_norm_behind_it(tmp_path):
    b = Builder(((3, 16), "float16"))
    padded = b.pad(b.norm("rms_norm", 0), -2.0, (2, 1), (0, 0))
    assert_right(b.problem(padded), tmp_path)
    b = Builder(((3, 13), "float32"))
    padded = b.pad(0, 0.5, (1, 0), (3, 4))
    first, second = (tmp_path / name for name in "ab")
    first.mkdir(), second.mkdir()
    assert_right(b.problem(padded), first)
    assert_right(b.problem(b.permute(padded, 1, 0)), second)


@needs_gxx
def test_the_order_of_ctas_changes_nothing(tmp_path):
    problem = packed_rotation(batch=2, length=37, heads=4, kv_heads=2, dim=16)
    config = GroupConfig(128, 1)
    inputs = [torch.randn(shape).to(getattr(torch, dtype)) for shape, dtype in problem.inputs]
    runs = []
    for seed in range(2):
        (folder := tmp_path / str(seed)).mkdir()
        runs.append(emulate(problem, config, inputs, folder, seed))
    assert all(torch.equal(one, other) for one, other in zip(*runs))
    assert_close(problem, runs[0], expected(problem, inputs))


# -- refusals ----------------------------------------------------------------------------------------------------------


def reason(problem) -> str | None:
    return group_cuda.unsupported(problem, SM_80)


def unary(operator, shape=(4, 8), dtype="float16", **more):
    b = Builder((shape, dtype))
    return b.problem(b.add(operator, 0, **more))


def many_sources(count):
    b = Builder(*[((8,), "float16")] * count)
    total = 0
    for source in range(1, count):
        total = b.add("add", total, source)
    return b.problem(total)


def many(results=1, operators=1):
    b = Builder(((8,), "float16"))
    for _ in range(operators):
        last = b.add("relu", 0)
    return b.problem(*[last] * results)


def two_norms(operator="add", shape=(3, 16)):
    b = Builder((shape, "float16"))
    return b.problem(b.add(operator, b.norm("rms_norm", 0), b.norm("layer_norm", 0)))


def columns_of_a_norm():
    b = Builder(((16, 16), "float16"))
    return b.problem(b.permute(b.norm("rms_norm", 0), 1, 0))


def two_rows_at_once():
    b = Builder(((3, 16), "float16"))
    normed = b.norm("rms_norm", 0)
    return b.problem(b.add("add", normed, b.concat(0, b.cut(normed, 0, 1, 3), b.cut(normed, 0, 0, 1))))


def a_row_and_the_first_one():
    b = Builder(((3, 16), "float16"))
    normed = b.norm("rms_norm", 0)
    return b.problem(b.add("add", normed, b.cut(normed, 0, 0, 1)))


def a_norm_twice_in_a_concatenation():
    b = Builder(((3, 16), "float16"))
    normed = b.norm("rms_norm", 0)
    return b.problem(b.concat(0, normed, normed))


@pytest.mark.parametrize(
    "problem, why",
    [
        (unary("relu", dtype="float64"), "it holds float64, which is none of float32"),
        (unary("negative", dtype="uint8"), "it holds uint8"),
        (unary("relu", (1 << 16, 1 << 15)), "(65536, 32768) is 2^31 elements or more; indices are 32-bit"),
        (unary("relu", (0, 8)), "(0, 8) has no elements"),
        (many_sources(17), "17 sources, more than 16"),
        (many(results=17), "17 results, more than 16"),
        (many(operators=97), "97 operators, more than 96"),
        (unary("gelu", dtype="float32"), "gelu in a result of float32"),
        (unary("exp", dtype="float32"), "exp in a result of float32"),
        (unary("sin", dtype="float32"), "sin in a result of float32"),
        (unary("cos", dtype="float64"), "it holds float64"),
        (unary("sqrt", dtype="int32"), "sqrt of int32"),
        (unary("clip", dtype="int64", numbers=(0.0, 1.0)), "clip of int64"),
        (unary("negative", dtype="bool"), "negative of bool"),
        (two_norms(), "a result of several norms"),
        (columns_of_a_norm(), "rows of 16 of rms_norm are no rows of a result (16, 16)"),
        (two_rows_at_once(), "rows of 16 of rms_norm are no rows of a result"),
        (a_row_and_the_first_one(), "rows of 16 of rms_norm are no rows of a result (3, 16)"),
        (a_norm_twice_in_a_concatenation(), "rows of 16 of rms_norm are no rows of a result (6, 16)"),
        (modulated(20), "rows of 20 of layer_norm are no rows of a result"),
        (modulated((8 << 12) + 8, m=1), "rows of 32776 are too long"),
        (RowProblem(8, 64, "float16"), "it is no elementwise group"),
    ],
)
def test_what_is_not_supported_says_why(problem, why):
    assert why in (reason(problem) or "")


def test_what_is_supported():
    assert reason(many_sources(16)) is None
    assert reason(many(results=16)) is None and reason(many(operators=96)) is None
    assert reason(unary("sqrt", dtype="float32")) is None
    assert reason(unary("logical_not", dtype="bool")) is None
    assert all(reason(problem) is None for problem in CASES.values())


def test_what_makes_no_sense_is_refused():
    x = Tensor((8,), "float16")
    with pytest.raises(InputError, match="operator 'softmax' is none of a group's"):
        Value("softmax", (0,), (8,), "float16")
    with pytest.raises(InputError, match="add reads value 1, which is not before it"):
        GroupProblem((x,), (Value("add", (0, 1), (8,), "float16"),), (1,))
    with pytest.raises(InputError, match="result 0 is none of the values"):
        GroupProblem((x,), (Value("relu", (0,), (8,), "float16"),), (0,))


def test_bytes_that_views_leave_out_are_not_counted():
    """The values of a packed projection are no part of its rotation."""
    problem = packed_rotation(**SMALL, dim=16)
    queries_and_keys, tables = 5 * 3 * 16, 5 * 16
    assert problem.elements_read == (queries_and_keys, tables, tables, 0)
    config = group_cuda.configs(problem, SM_80)[0]
    whole, half = gated_halves(4096, m=4096), transposed((4096, 4096), (1, 0))
    assert group_cuda.predict_us(problem, config, SM_80) > 0
    assert group_cuda.predict_us(whole, config, SM_80) > group_cuda.predict_us(half, config, SM_80)


def test_titles_and_sizes():
    problem = gated_halves(40, m=7)
    assert group_kind.title(problem) == "group 1x7x40 gelu multiply"
    assert group_kind.sizes(problem) == {"read": 560, "written": 280, "operators": 4}


@needs_gxx
@pytest.mark.timeout(60)
@pytest.mark.parametrize("normed", [False, True])
def test_values_that_are_read_twice_are_looked_at_once(normed, tmp_path):
    """2^40 ways lead from the result to the source."""
    b = Builder(((16, 8), "float16"))
    x = b.permute(0, 1, 0)  # a transposition, that threads should walk along the other axis
    for _ in range(40):
        x = b.add("maximum", x, x)
    problem = b.problem(x, b.norm("rms_norm", x)) if normed else b.problem(x)
    assert_right(problem, tmp_path)
    te.create_prim_func(group_kind.tensors(problem))


def test_conditions_that_double():
    b = Builder(((4, 16), "float16"))
    x = b.add("equal", 0, 0)
    for _ in range(3):
        x = b.add("logical_and", x, x)
    assert group_cuda.unsupported(b.problem(x), SM_80) is None
    for _ in range(3):
        x = b.add("logical_and", x, b.cast(x, "bool"))
    assert "operators in one condition" in group_cuda.unsupported(b.problem(x), SM_80)
