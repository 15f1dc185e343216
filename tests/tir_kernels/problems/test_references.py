"""The PyTorch references agree with the NumPy definitions of the problems."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from stof_tvm.tuning.measuring.cases import Random
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.attention.reference import attention_reference as attention_definition
from tir_kernels.fusion.group.problem import GroupProblem, Tensor, Value
from tir_kernels.fusion.grouped.problem import GroupedProblem
from tir_kernels.fusion.problem import ACTIVATIONS, GemmProblem, MlpProblem, Norm, RowProblem, Step
from tir_kernels.fusion.reference import fusion_reference as fusion_definition
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.rotary import RotaryProblem
from tir_kernels.problems.registry import kind_of

BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
PROBLEMS = [
    *(RowProblem(5, 16, "float32", (BIAS, Step(kind), GATE)) for kind in ACTIVATIONS),
    RowProblem(5, 16, "float32", (Step("scale", value=0.5), RESIDUAL), Norm("layer_norm", 1e-5), keeps_sum=True),
    RowProblem(5, 16, "float32", (RESIDUAL, Step("clip", value=0.5)), Norm("rms_norm", 1e-6, bias=True)),
    RowProblem(5, 16, "float32", (), Norm("layer_norm", 1e-5, weight=False, bias=False)),
    GemmProblem(5, 16, "float32", (BIAS, Step("gelu"), RESIDUAL), k=8),
    GemmProblem(5, 16, "float32", (BIAS,), Norm("layer_norm", 1e-5), k=8, w_layout="kn"),
    MlpProblem(
        GemmProblem(5, 4, "float32", (BIAS, Step("relu")), k=8), GemmProblem(5, 16, "float32", (BIAS, RESIDUAL), k=4)
    ),
]


def inputs_of(problem) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).double() for shape, _ in problem.inputs]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_chains_products_and_norms(problem):
    inputs = inputs_of(problem)
    expected = fusion_definition(problem, *(x.numpy() for x in inputs))
    for x, y in zip(kind_of(problem).reference(problem, inputs, torch), expected, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-6, atol=1e-6)


def test_embeddings_add_up():
    problem = EmbeddingProblem(6, 8, "float32", (Table(10), Table(3, 3)))
    index, positions = torch.arange(6), torch.tensor([2, 0, 1])
    tables = [torch.randn(10, 8), torch.randn(3, 8)]
    (out,) = kind_of(problem).reference(problem, [index, tables[0], positions, tables[1]], torch)
    assert torch.equal(out, torch.stack([tables[0][i] + tables[1][positions[i % 3]] for i in range(6)]))


def test_grouped_products_draw_groups_of_equal_size():
    problem = GroupedProblem(7, 8, 5, 3, "float32", offsets_dtype="int64")
    a, w, offsets = kind_of(problem).draw(problem, Random(torch.device("cpu"), 0))
    assert offsets.tolist() == [2, 4, 7] and offsets.dtype == torch.int64
    (actual,) = kind_of(problem).reference(problem, [a, w, offsets], torch)
    expected = [row @ w[group].T for row, group in zip(a, (0, 0, 1, 1, 2, 2, 2))]
    torch.testing.assert_close(actual, torch.stack(expected))


def test_grouped_products_have_gates_and_steps_and_choose_rows():
    """Rows that do not exist are NaN; those of no group are what the steps make of zeros."""
    steps = (Step("scale", value=2.0), Step("sigmoid"))
    problem = GroupedProblem(5, 8, 3, 2, "float32", gate="silu", steps=steps, gathered_from=4)
    a, w, offsets, rows = kind_of(problem).draw(problem, Random(torch.device("cpu"), 0))
    assert [tuple(x.shape) for x in (a, w, offsets, rows)] == [shape for shape, _ in problem.inputs]
    rows, offsets = torch.tensor([3, 0, 4, 1, 2], dtype=torch.int32), torch.tensor([1, 4], dtype=torch.int32)
    (actual,) = kind_of(problem).reference(problem, [a, w, offsets, rows], torch)
    products = torch.stack([w[0] @ a[3], w[1] @ a[0], torch.full((16,), torch.nan), w[1] @ a[1], torch.zeros(16)])
    x = torch.nn.functional.silu(products[:, :8]) * products[:, 8:]
    torch.testing.assert_close(actual, torch.sigmoid(2 * x), equal_nan=True)


@pytest.mark.parametrize("packed", [None, 5])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_rotation_keeps_lengths_and_angle_zero_keeps_all(packed, layout):
    problem = RotaryProblem(2, 4, 2, 1, 8, "float32", packed, out_layout=layout)
    sources = [torch.randn(shape) for shape in problem.source_shapes]
    angle = torch.zeros(problem.table_shape)
    q, k = kind_of(problem).reference(problem, [*sources, angle.cos(), angle.sin()], torch)
    assert [tuple(x.shape) for x in (q, k)] == problem.out_shapes
    expected = sources[0][:, :, :2]
    assert torch.equal(q if layout == "bshd" else q.transpose(1, 2), expected)
    angle = torch.rand(problem.table_shape[0], 4, 4).repeat(1, 1, 2)
    turned, _ = kind_of(problem).reference(problem, [*sources, angle.cos(), angle.sin()], torch)
    assert torch.allclose(turned.norm(dim=-1).sum(), expected.norm(dim=-1).sum(), rtol=1e-5)


ATTENTIONS = [
    AttentionProblem(2, 4, 2, 7, 9, 8, 6, "float32", 0.3),
    AttentionProblem(2, 4, 4, 7, 9, 8, 8, "float32", 0.3, bias_shape=(1, 4, 7, 9), gives_lse=True),
    AttentionProblem(2, 4, 4, 7, 9, 8, 8, "float32", 0.3, bias_shape=(1, 4, 7, 9), softcap=0.5),
    AttentionProblem(1, 2, 2, 7, 7, 8, 8, "float32", 0.3, layouts=Layouts("bshd", "bshd", "bshd", "bshd")),
    AttentionProblem(
        1, 2, 2, 7, 7, 8, 8, "float32", 0.3, layouts=Layouts(*(View(7 * 48, 16 * i, 0, 8, 48) for i in range(3)))
    ),
]


@pytest.mark.parametrize("problem", ATTENTIONS, ids=str)
def test_attention_with_rows_that_keep_nothing(problem):
    generator = torch.Generator().manual_seed(2)
    normal = lambda shape: torch.randn(shape, generator=generator).double()
    inputs = [normal(problem.shape(name)) for name in "qkv"]
    bias = None if problem.bias_shape is None else normal(problem.bias_shape)
    keep = torch.rand(1, 1, problem.q_len, problem.kv_len, generator=generator) < 0.5
    keep[..., 0, :] = False
    expected = attention_definition(
        problem, *(x.numpy() for x in inputs), keep.numpy(), *([] if bias is None else [bias.numpy()])
    )
    results = kind_of(problem).reference(problem, inputs if bias is None else [*inputs, bias], torch, keep)
    expected = expected if problem.gives_lse else (expected,)
    for x, y in zip(results, expected, strict=True):
        np.testing.assert_allclose(x.numpy(), y, rtol=1e-5, atol=1e-5)


def test_two_parts_of_a_mask_give_the_whole():
    whole = AttentionProblem(1, 2, 2, 8, 8, 4, 4, "float32", 0.5)
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(whole.shape(name), generator=generator).double() for name in "qkv"]
    keep = torch.rand(1, 1, 8, 8, generator=generator) < 0.6
    near = (torch.arange(8)[:, None] - torch.arange(8)).abs() <= 1
    parts = replace(whole, gives_lse=True), replace(whole, continues=True)
    first = kind_of(parts[0]).reference(parts[0], inputs, torch, keep & near)
    (both,) = kind_of(parts[1]).reference(parts[1], [*inputs, *first], torch, keep & ~near)
    torch.testing.assert_close(both, kind_of(whole).reference(whole, inputs, torch, keep)[0])


def test_one_row_at_a_place_without_dimensions():
    sources = Tensor((16,), "int32"), Tensor((), "int32")
    problem = GroupProblem(sources, (Value("rows", (0, 1), (), "int32", (0, 0)),), (2,))
    inputs = [torch.arange(16, dtype=torch.int32), torch.tensor(5, dtype=torch.int32)]
    (found,) = kind_of(problem).reference(problem, inputs, torch)
    assert found.shape == () and found == 5
