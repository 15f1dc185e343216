"""Keys (…, head size, length) taken from a packed tensor by unbind: their leading dimensions are not the scores'."""

import torch
from torch import nn

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM


class Channels(nn.Module):
    def forward(self, x):  # (B, 3 · H · D, S), as a convolution of 1 × 1 gives it
        q, k, v = x.unflatten(1, (3, 2, 4)).unbind(1)
        return torch.softmax(q.transpose(-1, -2) @ k, -1) @ v.transpose(-1, -2)


def test_unbound_keys_become_attention():
    x = torch.randn(2, 24, 16)
    engine = stof_tvm.build(Channels(), QUICK_LLVM, (x,), verify=False, tuning_logs=False, strict=True)
    torch.testing.assert_close(engine(x), Channels()(x))
