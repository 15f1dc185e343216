"""The CUDA kernel of reductions: its generated CUDA run on the CPU against PyTorch, what it refuses, its choices."""

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.tir_kernels.fusion.group.group_emulation import SM_80, expected
from tests.tir_kernels.fusion.reduce.reduce_emulation import assert_right, emulate
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.cuda.device import gpu_of
from tir_kernels.fusion.group.problem import REDUCTIONS, GroupProblem
from tir_kernels.fusion.problem import RowProblem
from tir_kernels.fusion.reduce import reduce as reduce_cuda
from tir_kernels.fusion.reduce.geometry import ReduceConfig, ReduceGeometry, reduce_configs
from tir_kernels.fusion.reduce.reduction import reduction_of
from tir_kernels.target import parse_target

sys.path.insert(0, str(Path(__file__).parents[3] / "gpu"))
from group_cases import Builder  # noqa: E402
from reduce_cases import counted, masked_mean, plain, reduced, transposed, variance  # noqa: E402

H200 = parse_target("cuda -arch=sm_90a")
CASES = {
    "rows": (plain("sum", (7, 72), (1,)), None),
    "rows, a thread each": (plain("sum", (300, 8), (1,), "bfloat16"), ReduceConfig(256, 1)),
    "rows, warps": (plain("sum", (3, 1100), (1,)), ReduceConfig(1, 64)),
    "odd rows": (plain("mean", (3, 2, 77), (2,), keepdims=True, out="float16"), ReduceConfig(8, 16)),
    "odd rows, split": (plain("sum", (2, 333), (1,), "float32"), ReduceConfig(4, 8, 3)),
    "all": (plain("max", (5, 4, 33), (0, 1, 2), "bfloat16"), None),
    "all, split": (plain("min", (5, 40, 33), (0, 1, 2)), ReduceConfig(1, 64, 7)),
    "columns": (plain("sum", (70, 40), (0,)), ReduceConfig(4, 32)),
    "columns, wide": (plain("sum", (19, 264), (0,)), ReduceConfig(32, 4)),
    "columns, split": (plain("sum", (70, 40), (0,), "float32"), ReduceConfig(8, 8, 5)),
    "odd columns": (plain("mean", (2, 37, 13), (1,), out="float16"), ReduceConfig(2, 32)),
    "odd columns, split": (plain("max", (2, 37, 13), (1,), "bfloat16"), ReduceConfig(4, 8, 2)),
    "one column": (plain("sum", (300, 1), (0,), "float32"), None),
    "middle": (plain("max", (2, 9, 3, 16), (1, 2)), None),
    "first and last": (plain("sum", (4, 6, 24), (0, 2), "float32"), None),
    "lengths of one": (plain("sum", (2, 5, 1, 16, 1), (1, 4), "float32", keepdims=True), None),
    "int32": (plain("sum", (20, 3, 8), (0,), "int32"), ReduceConfig(4, 8, 2)),
    "int64": (plain("max", (3, 100), (1,), "int64"), ReduceConfig(2, 64)),
    "int64, split": (counted((6, 200), (0, 1)), ReduceConfig(1, 32, 4)),
    "splits that no round of loads divides": (plain("sum", (400, 24), (0,)), ReduceConfig(4, 8, 40)),
    "variance": (variance((2, 50, 24)), None),
    "variance, split": (variance((2, 400, 16)), ReduceConfig(4, 16, 6)),
    "masked mean": (masked_mean(2, 20, 24), None),
    "masked mean, odd": (masked_mean(2, 9, 13, "bfloat16"), None),
    "transposed": (transposed((2, 24, 40)), None),
    **{f"{kind} of rows": (plain(kind, (3, 40), (1,)), None) for kind in REDUCTIONS},
    **{f"{kind} of columns": (plain(kind, (21, 24), (0,), "bfloat16"), ReduceConfig(4, 8)) for kind in REDUCTIONS},
}


@needs_gxx
@pytest.mark.parametrize("name", CASES)
def test_computes_what_pytorch_computes(name, tmp_path):
    problem, config = CASES[name]
    assert_right(problem, tmp_path, config, runs=2 if config is not None and config.splits > 1 else 1)


@needs_gxx
@pytest.mark.parametrize("axis", [0, 1])
def test_nan_and_infinity_stay(axis, tmp_path):
    """In every kind, wherever the thread is that meets them."""
    b = Builder(((16, 16), "float32"))
    problem = b.problem(*(reduced(b, kind, 0, (axis,)) for kind in ("max",)))
    x = torch.randn(16, 16)
    x[3, 5], x[7, 2], x[8, 8] = torch.nan, torch.inf, -torch.inf
    ((found,),) = emulate(problem, reduce_cuda.configs(problem, SM_80)[0], [x], tmp_path)
    torch.testing.assert_close(found, x.amax(axis), equal_nan=True)


CLASSES = {"isinf": [0, 1, 1, 0, 0, 0], "isnan": [0, 0, 1, 0, 0, 1], "isfinite": [24, 23, 22, 24, 24, 23]}


@needs_gxx
@pytest.mark.parametrize("kind", CLASSES)
def test_infinities_and_nans_are_counted(kind, tmp_path):
    b = Builder(((6, 24), "float16"))
    problem = b.problem(reduced(b, "sum", b.cast(b.add(kind, 0), "int32"), (1,)))
    x = torch.randn(6, 24).half()
    x[1, 3], x[2, 5], x[2, 6], x[5, 23] = torch.inf, -torch.inf, torch.nan, torch.nan
    ((found,),) = emulate(problem, reduce_cuda.configs(problem, SM_80)[0], [x], tmp_path)
    assert found.tolist() == CLASSES[kind]


@needs_gxx
@pytest.mark.parametrize("operator", ["equal", "not_equal"])
def test_a_comparison_is_a_result(operator, tmp_path):
    """As a model asks whether a row of a mask keeps anything."""
    b = Builder(((6, 24), "int32"))
    problem = b.problem(b.add(operator, reduced(b, "max", 0, (1,)), b.number(0, "int32")))
    x = torch.zeros(6, 24, dtype=torch.int32)
    x[2, 5] = x[4, 0] = 1
    ((found,),) = emulate(problem, reduce_cuda.configs(problem, SM_80)[0], [x], tmp_path)
    assert found.tolist() == [(largest == 0) == (operator == "equal") for largest in (0, 0, 1, 0, 1, 0)]


def two_reductions() -> GroupProblem:
    b = Builder(((4, 16), "float32"))
    return b.problem(reduced(b, "max", reduced(b, "sum", 0, (1,)), (0,)))


def read_on() -> GroupProblem:
    """What softmax does: each element less the largest."""
    b = Builder(((4, 16), "float32"))
    return b.problem(b.add("subtract", 0, reduced(b, "max", 0, (1,), keepdims=True)))


def beside() -> GroupProblem:
    b = Builder(((4, 16), "float32"))
    square = b.add("square", 0)
    return b.problem(square, reduced(b, "sum", square, (1,)))


def of_a_norm() -> GroupProblem:
    b = Builder(((4, 16), "float32"))
    return b.problem(reduced(b, "sum", b.norm("rms_norm", 0), (0,)))


def of_exponentials() -> GroupProblem:
    b = Builder(((4, 16), "float32"))
    return b.problem(reduced(b, "sum", b.add("exp", 0), (1,)))


def turned_after() -> GroupProblem:
    b = Builder(((4, 8, 16), "float32"))
    return b.problem(b.permute(reduced(b, "sum", 0, (2,)), 1, 0))


REFUSED = {
    "2 reductions": two_reductions(),
    r"subtract \(4, 16\) after a reduction to 4 elements": read_on(),
    "a result that is not computed from the reduction": beside(),
    "rms_norm beside a reduction": of_a_norm(),
    "exp in a result of float32": of_exponentials(),
    r"permute \(8, 4\) after a reduction": turned_after(),
    "max of bool": plain("max", (4, 16), (1,), "bool"),
    "mean of int32": plain("mean", (4, 16), (1,), "int32"),
    "it holds float64": plain("sum", (4, 16), (1,), "float32", out="float64"),
    "2\\^31 elements or more": plain("sum", (1 << 16, 1 << 15), (1,)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_refusals_name_the_reason(why):
    problem = REFUSED[why]
    assert re.search(why, reduce_cuda.unsupported(problem, SM_80))


@pytest.mark.parametrize("problem", [RowProblem(4, 16, "float16"), Builder(((4,), "float32")).problem()])
def test_what_holds_no_reduction_is_refused(problem):
    assert reduce_cuda.unsupported(problem, SM_80) == "it holds no reduction"


def geometry(problem, config=None, target=H200) -> ReduceGeometry:
    return reduce_cuda._geometry(problem, config or reduce_cuda.configs(problem, target)[0])


@pytest.mark.parametrize(
    "shape, axes, vector_axis, along",
    [
        ((8, 100, 768), (1,), 2, False),
        ((8, 100, 768), (2,), 2, True),
        ((8, 100, 768), (0, 2), 2, True),
        ((4, 125, 256, 512, 1), (1, 2, 4), 3, False),
        ((7, 1), (0,), 0, True),
    ],
)
def test_vectors_lie_along_what_is_read_in_order(shape, axes, vector_axis, along):
    reduction = reduction_of(plain("sum", shape, axes))
    assert (reduction.vector_axis, reduction.along) == (vector_axis, along)
    assert sorted((*reduction.kept, *reduction.reduced)) == list(range(len(shape)))


def test_vectors_follow_the_memory_of_a_transposed_tensor():
    reduction = reduction_of(transposed((2, 24, 40)))
    assert reduction.shape == (2, 40, 24) and reduction.axes == (2,)
    assert reduction.vector_axis == 1 and not reduction.along


@pytest.mark.parametrize(
    "shape, axes",
    [((4, 32000, 512), (1,)), ((1 << 24,), (0,)), ((64, 4096, 1024), (2,)), ((1 << 20, 8), (1,)), ((1 << 20, 4), (0,))],
)
def test_large_reductions_keep_the_whole_gpu_busy(shape, axes):
    g, gpu = geometry(plain("sum", shape, axes)), gpu_of(H200)
    assert g.ctas * g.threads >= gpu.multiprocessors * 512
    assert g.threads <= 1024 and g.shared_bytes <= 48 << 10


@pytest.mark.parametrize("shape, axes", [((4, 16), (1,)), ((16, 4), (0,)), ((1,), (0,)), ((3, 70), (0, 1))])
def test_small_reductions_are_not_split(shape, axes):
    assert geometry(plain("sum", shape, axes)).config.splits == 1


def test_configurations_differ_and_have_threads_enough_for_whole_warps():
    for shape, axes in (((37, 512), (1,)), ((2000, 96), (0,)), ((70000,), (0,)), ((5, 3), (0,))):
        configs = reduce_configs(reduction_of(plain("sum", shape, axes)), gpu_of(H200))
        assert len(set(configs)) == len(configs)
        assert all(config.items * config.sharing % 32 == 0 for config in configs)


def test_prediction_counts_what_is_read_once():
    small, large = plain("sum", (64, 1 << 16), (1,)), plain("sum", (64, 1 << 20), (1,))
    us = [reduce_cuda.predict_us(p, reduce_cuda.configs(p, H200)[0], H200) for p in (small, large)]
    assert us[1] - us[0] == pytest.approx(64 * ((1 << 20) - (1 << 16)) * 2 / gpu_of(H200).bandwidth / 0.93, rel=0.2)


def test_the_workspace_is_for_splits_only():
    problem = plain("sum", (70, 40), (0,))
    assert reduce_cuda.operands(problem, ReduceConfig(8, 32), H200).workspace == ()
    (partials, kind), (arrivals, _) = reduce_cuda.operands(problem, ReduceConfig(4, 8, 5), H200).workspace
    assert (partials, kind, arrivals) == ((5, 1, 8, 8), "uint32", (2,))
    expected_zero = expected(problem, [torch.zeros(70, 40, dtype=torch.float16)])[0]
    assert expected_zero.eq(0).all()
