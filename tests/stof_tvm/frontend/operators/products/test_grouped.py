"""Grouped products: PyTorch's numbers from either operator, and what is refused."""

import pytest
import torch

import stof_tvm
from stof_tvm.errors import UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

pytest.importorskip("transformers.integrations.moe")  # registers the operator that stands in for PyTorch's


class Grouped(torch.nn.Module):
    """Weights (groups, n, k), transposed where they are multiplied, or (groups, k, n)."""

    def __init__(self, multiply, weight, transposed=True):
        super().__init__()
        self.multiply, self.transposed = multiply, transposed
        self.weight = torch.nn.Parameter(weight)

    def forward(self, a, offsets):
        return self.multiply(a, self.weight.transpose(-2, -1) if self.transposed else self.weight, offsets)


def of_pytorch(a, w, offsets):
    return torch.nn.functional.grouped_mm(a, w, offs=offsets)


def of_transformers(a, w, offsets):
    return torch.ops.transformers.grouped_mm_fallback(a, w, offsets)


def build(model, *inputs):
    return stof_tvm.build(model, QUICK_LLVM, inputs, tuning_logs=False, verify=False)


def expected(a, w, offsets):
    out, start = torch.zeros(a.shape[0], w.shape[1]), 0
    for matrix, end in zip(w.float(), offsets):
        out[start:end] = a[start:end].float() @ matrix.T
        start = end
    return out


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    "multiply, dtype",
    [(of_pytorch, torch.bfloat16), (of_transformers, torch.float32), (of_transformers, torch.float16)],
)
def test_one_engine_for_any_offsets(multiply, dtype, transposed):
    a, w = torch.randn(24, 16).to(dtype), torch.randn(3, 32, 16).to(dtype)
    weight = w if transposed else w.transpose(-2, -1).contiguous()
    ends = [[5, 5, 24], [0, 24, 24], [24, 24, 24], [8, 16, 24], [0, 0, 7]]
    offsets = [torch.tensor(end, dtype=torch.int32) for end in ends]
    engine = build(Grouped(multiply, weight, transposed), a, offsets[0])
    for offset in offsets:
        torch.testing.assert_close(
            engine(a, offset).float(), expected(a, w, offset.tolist()), atol=1e-5, rtol=torch.finfo(dtype).eps
        )


def test_experts_are_one_product_of_the_report():
    a, offsets = torch.randn(24, 16), torch.tensor([3, 24], dtype=torch.int64)
    engine = build(Grouped(of_transformers, torch.randn(2, 32, 16)), a, offsets)
    (segment,) = engine.report().segments
    assert segment.operators == ("grouped_linear",) and segment.config == "schedule rule grouped"


def test_as_many_matrices_are_a_batched_product():
    a, w = (torch.randn(3, size, 16).bfloat16() for size in (8, 24))
    model = Grouped(lambda a, w, _: torch.nn.functional.grouped_mm(a, w), w)
    got = build(model, a, torch.zeros(3))(a, torch.zeros(3))
    torch.testing.assert_close(got.float(), (a.float() @ w.float().mT), atol=1e-5, rtol=1e-2)


@pytest.mark.parametrize(
    "a, w, name",
    [
        ((3, 8, 16), (16, 24), "3-D by 2-D"),  # groups along the columns of w
        ((8, 24), (24, 16), "2-D by 2-D"),  # groups along k, as gradients have them
    ],
)
def test_groups_along_other_dimensions_are_refused(a, w, name):
    offsets = torch.tensor([8, 8, 24] if len(a) == 2 else [0, 8, 24], dtype=torch.int32)
    model = Grouped(of_pytorch, torch.randn(w).bfloat16(), transposed=False)
    with pytest.raises(UnsupportedError, match=name):
        build(model, torch.randn(a).bfloat16(), offsets)


def test_another_library_s_operator_of_the_same_name_is_refused():
    library = torch.library.Library("stof_other", "DEF")
    library.define("grouped_mm_fallback(Tensor input, Tensor weight, Tensor offs) -> Tensor")
    library.impl("grouped_mm_fallback", lambda a, w, o: a @ w[0], "CompositeExplicitAutograd")
    model = Grouped(torch.ops.stof_other.grouped_mm_fallback, torch.randn(2, 16, 16))
    with pytest.raises(UnsupportedError, match=r"no converter: stof_other\.grouped_mm_fallback"):
        build(model, torch.randn(4, 16), torch.tensor([2, 4], dtype=torch.int32))
