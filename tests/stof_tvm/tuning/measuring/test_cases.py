"""Cases of problems whose outputs have several dtypes: what counts as a mistake."""

import pytest
import torch

from stof_tvm.tuning.measuring.cases import FusionCase
from tir_kernels.fusion.sorting.problem import MergeProblem, SortProblem

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "problem",
    [
        SortProblem(3, 40, 40, 5, "float16", True),
        SortProblem(2, 30, 30, 30, "bool", order_dtype="int32", ranks=True),
        MergeProblem(2, 50, 10, 20, "int64"),
        MergeProblem(1, 33, 8, 33, "bfloat16", True, ranks=True),
    ],
    ids=str,
)
def test_an_order_is_right_or_wrong(problem):
    case = FusionCase(problem, CPU, 0)
    assert [(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in case.outputs] == problem.outputs
    case.poison()
    assert case.mistake() is not None
    for out, expected in zip(case.outputs, case.expected):
        out.copy_(expected)
    assert case.mistake() is None
    case.outputs[1][0, 0] += 1
    assert "output 1 is off by 1.00e+00" in case.mistake()
