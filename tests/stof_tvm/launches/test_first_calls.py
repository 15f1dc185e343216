"""What a first call, which compiles a kernel, leaves in memory."""

import gc
import random
import weakref

import torch

from stof_tvm import masks, sparse_attention


def test_no_tensor_is_kept():
    """Kernels are parsed below the call, and TVM's parser keeps the frames that it sees in circles."""

    def called():
        q, k, v = (torch.randn(1, 1, 32, 16) for _ in range(3))
        out = sparse_attention(q, k, v, masks.causal(), scale=random.random())  # a kernel that nobody has compiled
        return [weakref.ref(x) for x in (q, k, v, out)]

    gc.collect()
    gc.disable()
    try:
        assert [kept() for kept in called()] == [None] * 4
    finally:
        gc.enable()
