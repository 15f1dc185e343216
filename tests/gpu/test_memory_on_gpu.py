"""Memory of a GPU, and of the process, over 10,000 calls of random lengths: engines of ranges and without padding."""

import gc

import pytest
import torch
from torch.export import Dim

import stof_tvm
from tests.robustness.test_padded_ranges import Encoder
from tests.robustness.test_sharing import resident

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

DEVICE, TARGET = "cuda", None
LONGEST, WIDTH = 256, 128
CALLS, WARM_UP = 10_000, 1_000
ON_GPU, IN_PROCESS = 8 << 20, 16 << 20  # bytes that allocators may keep


def model():
    return Encoder(WIDTH).half().eval().to(DEVICE)


def ones(*shape):
    return torch.ones(shape, dtype=torch.int64, device=DEVICE)


def ranged(lazy):
    """A call of an engine of a range of lengths, those of the random lengths for a lazy one compiled when they come."""
    dims = {"ids": {1: Dim("length", min=8, max=LONGEST)}}
    engine = stof_tvm.build(model(), TARGET, (ones(1, 9),), dynamic_shapes=dims, lazy=lazy)
    few = [8, 9, 100, 255, LONGEST]  # a lazy engine compiles each of its lengths
    return lambda lengths: engine(ones(1, few[sum(lengths) % len(few)] if lazy else max(8, *lengths)))


def packed():
    """A call of an engine without padding, of more sets of lengths than it keeps."""
    engine = stof_tvm.build(model(), TARGET, (ones(2, LONGEST), ones(2, LONGEST)), without_padding=True)

    def call(lengths):
        ids = ones(len(lengths), max(lengths))
        places = torch.arange(ids.shape[1], device=DEVICE)
        return engine(ids, attention_mask=(places < torch.tensor(lengths, device=DEVICE)[:, None]).long())

    return call


def used() -> int:
    """Bytes of the GPU that are taken, whoever took them; 0 without one."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


@pytest.mark.parametrize("make", [lambda: ranged(False), lambda: ranged(True), packed], ids=["range", "lazy", "packed"])
def test_memory_stays_as_it_is(make):
    call, numbers = make(), torch.Generator().manual_seed(0)
    batches = [torch.randint(1, LONGEST + 1, (1 + n % 4,), generator=numbers).tolist() for n in range(500)]
    for number in range(-1, WARM_UP):
        call([LONGEST] * 4 if number < 0 else batches[number % len(batches)])
    gc.collect()
    before, returned = (used(), resident()), 0
    for _ in range(CALLS):
        returned += call(batches[int(torch.randint(len(batches), (), generator=numbers))]).nbytes
    grown = used() - before[0], resident() - before[1]
    assert grown[0] <= ON_GPU and grown[1] <= IN_PROCESS, grown
    assert returned > 8 * max(ON_GPU, IN_PROCESS)  # what is kept would be seen
