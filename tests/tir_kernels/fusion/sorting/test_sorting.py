"""The kernels that sort: their generated CUDA run on the CPU against PyTorch's stable order, and what they refuse."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.gpu.sorting_cases import SortingCase, merge_of, sort_of
from tests.gpu.sources import source
from tests.tir_kernels.attention.cuda_emulator import EmulatedKernel, aligned
from tests.tir_kernels.fusion.group.group_emulation import INTEGERS
from tir_kernels.errors import InputError, UnsupportedError
from tir_kernels.fusion.sorting import merge, sort
from tir_kernels.fusion.sorting.problem import MAX_FAN, MAX_RUN, SortProblem
from tir_kernels.target import parse_target

SM_80 = parse_target("cuda -arch=sm_80")
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed: nothing can be emulated")
pytestmark = needs_gxx


def emulate(problem, inputs, folder, config=None, seed=0) -> list[torch.Tensor]:
    """Outputs of the generated CUDA, CTAs in random order; what is not written holds the largest integer."""
    template = sort if isinstance(problem, SortProblem) else merge
    config = config or template.configs(problem, SM_80)[0]
    outputs = [
        torch.full(shape, torch.iinfo(kind).max, dtype=kind)
        for shape, kind in ((shape, INTEGERS[getattr(torch, dtype).itemsize]) for shape, dtype in problem.outputs)
    ]
    arrays = [aligned(x.contiguous().view(INTEGERS[x.itemsize]).numpy()) for x in (*inputs, *outputs)]
    names = ["x", "values", "order", "ranks"]
    if template is merge:
        names = ["values", "order", "out_values", "out_order", "ranks"]
    if template is sort:
        layout = sort.Layout(problem, config)
        ctas, threads = layout.ctas, layout.threads
    else:
        ctas, threads = merge.grid_size(problem), config.warps * 32
    kernel = EmulatedKernel(source(template, problem, config), folder)
    kernel(dict(zip(names, arrays)), {}, np.random.default_rng(seed).permutation(ctas), threads, 0)
    return [
        torch.from_numpy(array.copy()).view(getattr(torch, dtype)).reshape(shape)
        for array, (shape, dtype) in zip(arrays[len(inputs) :], problem.outputs)
    ]


def assert_sorted(problem, folder, config=None, inputs=None):
    case = SortingCase(problem, config)
    inputs = inputs or case.make_inputs(0, "cpu")
    for actual, expected in zip(emulate(problem, inputs, folder, config), case.torch_sequence(*inputs), strict=True):
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        bits = INTEGERS[actual.itemsize]
        torch.testing.assert_close(actual.view(bits), expected.contiguous().view(bits), rtol=0, atol=0)


@pytest.mark.parametrize(
    "problem",
    [
        sort_of(1, 1, "float32"),
        sort_of(9, 2, "bool", descending=True),
        sort_of(70, 8, "float16", 2, descending=True),
        sort_of(5, 13, "int32", 5, order_dtype="int32"),
        sort_of(11, 64, "float32", 8, descending=True),
        sort_of(3, 300, "bfloat16"),
        sort_of(2, 77, "int64", ranks=True),
        sort_of(2, 1024, "int8", ranks=True),
        sort_of(2, 2500, "float32", 20, order_dtype="int32"),
        sort_of(1, 1500, "float64", descending=True),
    ],
    ids=str,
)
def test_rows_and_runs(problem, tmp_path):
    assert_sorted(problem, tmp_path)


@pytest.mark.parametrize(
    "problem",
    [
        merge_of(2, 90, 10, "int64", ranks=True),
        merge_of(3, 100, 7, "float16", 20, descending=True),
        merge_of(1, 700, 20, "float32", order_dtype="int32"),  # more runs than are merged at a time
        merge_of(5, 9, 1, "bool"),
        merge_of(2, 70, 40, "bfloat16", descending=True),
    ],
    ids=str,
)
def test_merged_runs(problem, tmp_path):
    assert_sorted(problem, tmp_path)


def test_every_configuration(tmp_path):
    for template, problem in ((sort, sort_of(9, 50, "float32")), (merge, merge_of(1, 330, 20, "int32"))):
        for config in template.configs(problem, SM_80):
            folder = tmp_path / f"{template.NAME} {config.label}"
            folder.mkdir()
            assert_sorted(problem, folder, config)


@pytest.mark.parametrize("descending", [False, True])
def test_nan_is_the_largest_and_zeros_are_equal(descending, tmp_path):
    values = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-40, -1e-40, 3e38, -torch.nan, -0.0, 0.0, -3e38, 1.0]
    x = torch.tensor([values, values[::-1]])
    (values, order) = emulate(sort_of(2, 13, "float32", descending=descending), [x], tmp_path)
    expected = x.sort(dim=1, descending=descending, stable=True)
    assert torch.equal(order, expected.indices)
    torch.testing.assert_close(values, x.gather(1, order), rtol=0, atol=0, equal_nan=True)


def test_runs_and_merges_sort_long_rows(tmp_path):
    """As the pass puts them together: rows of 2,100 elements in three runs, of which some are kept, and merged."""
    first = sort_of(2, 2100, "int32", 900, order_dtype="int32", descending=True)
    x = SortingCase(first, None).make_inputs(3, "cpu")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    runs = emulate(first, x, tmp_path / "a")
    assert first.kept == 900 + 900 + 52
    last = merge_of(2, first.kept, 900, "int32", 900, descending=True)
    values, order = emulate(last, runs, tmp_path / "b")
    expected = x[0].sort(dim=1, descending=True, stable=True)
    assert torch.equal(values, expected.values[:, :900]) and torch.equal(order, expected.indices[:, :900])


def test_what_is_refused():
    problem = sort_of(4, 64, "float32")
    assert sort.unsupported(problem, SM_80) is None and "sorts no rows" in sort.unsupported(None, SM_80)
    assert "merges no" in merge.unsupported(problem, SM_80)
    assert "2^31" in sort.unsupported(sort_of(1 << 21, 1024, "int8"), SM_80)
    assert "2^31" in merge.unsupported(merge_of(1 << 20, 2048, 1024, "int8"), SM_80)
    for wrong, error, why in (
        ({"rows": 0}, InputError, "rows=0"),
        ({"run": MAX_RUN + 1}, InputError, "at most 1024"),
        ({"keep": 65}, InputError, "keep=65 is more than the 64"),
        ({"dtype": "uint64"}, UnsupportedError, "uint64"),
        ({"order_dtype": "int16"}, InputError, "int16"),
        ({"keep": 8, "ranks": True}, InputError, "ranks=True of 8 of 64"),
    ):
        with pytest.raises(error, match=why):
            replace(problem, **wrong)
    assert merge_of(1, 5000, 2, "int32").out_run == 2 * MAX_FAN


def test_predictions_grow_with_the_work():
    few, many = sort_of(64, 64, "float32", 8), sort_of(1 << 16, 64, "float32", 8)
    predicted = [sort.predict_us(p, sort.configs(p, SM_80)[0], SM_80) for p in (few, many)]
    assert 2 < predicted[0] < predicted[1]
    config = merge.configs(merge_of(1, 32768, 1024, "int64"), SM_80)[0]
    assert merge.predict_us(merge_of(1, 32768, 1024, "int64"), config, SM_80) < 20
