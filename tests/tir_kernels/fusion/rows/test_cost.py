"""Predicted times of the row kernels: bytes counted by hand, more for more work, other bandwidths elsewhere."""

import pytest

from tir_kernels.fusion.problem import Norm, RowProblem, Step
from tir_kernels.fusion.rows import chain as row_chain_cuda
from tir_kernels.fusion.rows import embedding as row_embedding_cuda
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.fusion.rows import rotary as row_rotary_cuda
from tir_kernels.fusion.rows.cost import START_US, predict_bytes_us, row_bytes
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.target import parse_target

H200, A100 = parse_target("cuda -arch=sm_90"), parse_target("cuda -arch=sm_80")
LAYER_NORM = Norm("layer_norm", 1e-5)
RESIDUAL = RowProblem(4096, 768, "float16", (Step("add", "row"), Step("add", "matrix")), LAYER_NORM, keeps_sum=True)


def predicted(template, problem, target=H200) -> float:
    return template.predict_us(problem, template.configs(problem, target)[0], target)


def test_bytes_of_inputs_and_outputs_once():
    assert row_bytes(RESIDUAL) == 2 * (4 * 4096 * 768 + 3 * 768)
    assert row_bytes(RowProblem(7, 8, "float32", (Step("gelu"),))) == 4 * 2 * 7 * 8


@pytest.mark.parametrize(
    "template, problem, moved",
    [
        (row_norm_cuda, RESIDUAL, row_bytes(RESIDUAL)),
        (row_chain_cuda, RowProblem(4096, 1024, "float16", (Step("silu"),)), 2 * 2 * 4096 * 1024),
        (
            row_embedding_cuda,
            EmbeddingProblem(4096, 768, "float16", (Table(30000), Table(512, 128), Table(2)), norm=LAYER_NORM),
            2 * 768 * (2 * 4096 + 128 + 2 + 2) + 8 * (2 * 4096 + 128),
        ),
        (row_rotary_cuda, RotaryProblem(2, 512, 8, 4, 64, "float16", 16), 2 * 2 * 1024 * 12 * 64 + 2 * 512 * 64 * 4),
    ],
    ids=lambda x: getattr(x, "NAME", ""),
)
def test_each_template_counts_its_own_bytes(template, problem, moved):
    assert predicted(template, problem) == pytest.approx(predict_bytes_us(moved, H200))
    assert START_US < predicted(template, problem) < predicted(template, problem, A100)


def test_within_a_fifth_of_what_an_h200_measured():
    for (m, n), us in {(4096, 768): 7.2, (32768, 768): 37.0, (4096, 4096): 26.5, (32768, 4096): 187.2}.items():
        problem = RowProblem(m, n, "float16", RESIDUAL.steps, LAYER_NORM)
        assert predicted(row_norm_cuda, problem) == pytest.approx(us, rel=0.2)
