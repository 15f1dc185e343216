"""What no schedule fits keeps its loops: tensors without elements, and steps that fail within TVM."""

import torch
import torch.nn.functional as F

import stof_tvm


class Unscheduled(torch.nn.Module):
    def forward(self, a, q, k, v):
        f, g = (F.elu(x) + 1 for x in (q, k))
        linear = f @ (g.transpose(-1, -2) @ v) / (f @ g.sum(-2)[..., None])  # the divisor is a product of one column
        return a[3:1], a[3:1] * 2 + 1, a[:, 2:2].sum(1), F.gelu(a[:0]), linear


def test_they_are_computed():
    a, (q, k, v) = torch.randn(4, 6), torch.randn(3, 2, 2, 8, 8)
    engine = stof_tvm.build(Unscheduled(), "llvm", (a, q, k, v), verify=False, tuning_logs=False)
    for got, expected in zip(engine(a, q, k, v), Unscheduled()(a, q, k, v), strict=True):
        torch.testing.assert_close(got, expected)
