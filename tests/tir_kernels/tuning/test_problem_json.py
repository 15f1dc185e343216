"""Problems as canonical text."""

import pytest

from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.errors import InputError
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.tuning.problem_json import problem_from_json, problem_to_json

STEPS = (Step("add", "row"), Step("gelu"), Step("scale", value=0.1), Step("multiply", "matrix"))
PROBLEMS = [
    RowProblem(3, 8, "float16", STEPS, Norm("rms_norm", 1e-6, bias=False), keeps_sum=True),
    GemmProblem(3, 8, "bfloat16", STEPS, k=16, w_layout="kn"),
    MlpProblem(GemmProblem(3, 8, "float16", STEPS, k=16), GemmProblem(3, 24, "float16", STEPS[:1], k=8)),
    EmbeddingProblem(6, 8, "float16", (Table(10), Table(3, period=3)), norm=Norm("layer_norm", 1e-12)),
    RotaryProblem(2, 4, 4, 2, 16, "float16", packed_heads=8, out_layout="bhsd"),
    GroupedProblem(12, 8, 16, 3, "bfloat16", "kn", "int64"),
    GroupedProblem(12, 8, 16, 3, "float16", gate="silu", steps=(Step("relu"),), gathered_from=5, rows_dtype="int64"),
    AttentionProblem(2, 4, 2, 8, 8, 16, 16, "float16", 0.3, (2, 1, 1, 8), "float32", gives_lse=True),
    AttentionProblem(2, 4, 2, 8, 8, 16, 16, "float16", 0.3, softcap=50.0),
    AttentionProblem(
        1, 2, 2, 8, 8, 16, 16, "float16", 0.25, layouts=Layouts("bshd", View(999, 1, 0, 16, 96), out="bshd")
    ),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: type(p).__name__)
def test_round_trip(problem):
    text = problem_to_json(problem)
    assert problem_from_json(text) == problem
    assert problem_to_json(problem_from_json(text)) == text


def test_fields_at_their_default_are_left_out():
    assert problem_to_json(RowProblem(3, 8, "float16")) == '{"dtype":"float16","is":"RowProblem","m":3,"n":8}'
    text = problem_to_json(AttentionProblem(1, 2, 2, 8, 8, 16, 16, "float16", 0.25))
    assert "softcap" not in text and problem_from_json(text).softcap is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "[" * 100_000,
        '{"is":"Step","kind":"gelu"}',
        '{"is":"NoProblem"}',
        '{"is":"RowProblem","m":3,"n":8,"colour":"red"}',
    ],
)
def test_text_of_no_problem_is_refused(text):
    with pytest.raises(InputError, match="is no problem of the kernel templates"):
        problem_from_json(text)


def test_values_out_of_range_are_refused():
    with pytest.raises(InputError, match="m=0"):
        problem_from_json('{"dtype":"float16","is":"RowProblem","m":0,"n":8}')
