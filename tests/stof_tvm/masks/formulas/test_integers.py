"""Formulas of integers are computed by NumPy, bit by bit as PyTorch computes them; others are left to PyTorch."""

import functools

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from stof_tvm import masks
from stof_tvm.masks import pattern
from stof_tvm.masks.formulas import integers
from stof_tvm.masks.formulas.formula import MixedPattern, formula_pattern
from stof_tvm.masks.walking.block_rows import walk
from tir_kernels.errors import MaskError
from tir_kernels.masks.bitmap import unpack_bitmap
from tir_kernels.masks.block_sparse import BlockLists, BlockSparseMask

INT64 = np.iinfo(np.int64)
Q_LEN, KV_LEN = 150, 330
WIDE = torch.randint(INT64.min, INT64.max, (KV_LEN,), generator=torch.Generator().manual_seed(0))
WIDE[:7] = torch.tensor([INT64.min, INT64.min + 1, -1, 0, 1, INT64.max - 1, INT64.max])
OWNER = torch.arange(KV_LEN) // 37
SMALL = torch.arange(KV_LEN, dtype=torch.int32)
SEVEN = torch.tensor([7])

TAKEN = {
    "sum": lambda b, h, q, k: (q * 7919 + k * 104729) % 13 == 0,
    "hash": lambda b, h, q, k: ((q ^ k) * 2654435761) % 97 < 3,
    "hash of shifts": lambda b, h, q, k: ((q * k) ^ ((q * k) >> 3)) % 32 < ((q + 2 * k) << 2) % 5,
    "named shifts": lambda b, h, q, k: torch.bitwise_right_shift(WIDE[q] ^ k, 62) > torch.bitwise_left_shift(q ^ k, 62),
    "documents": lambda b, h, q, k: (OWNER[q] * 31 + OWNER[k] * 17 + q + k) % 11 < 2,
    "overflowing sum": lambda b, h, q, k: (WIDE[q] + WIDE[k]) % 1000 < 300,
    "overflowing difference": lambda b, h, q, k: (WIDE[q] - WIDE[k]) // 1000 % -7 >= -3,
    "overflowing product": lambda b, h, q, k: (WIDE[q] * WIDE[k]) % 3 == 1,
    "overflowing shift": lambda b, h, q, k: ((WIDE[q] ^ k) << 40) < 0,
    "overflowing signs": lambda b, h, q, k: -(WIDE[q] | k) < (WIDE[q] & k).abs(),
    "largest divisors": lambda b, h, q, k: (WIDE[q] ^ k) % INT64.max + (WIDE[k] ^ q) % INT64.min > 0,
    "one": lambda b, h, q, k: (WIDE[q] ^ k) % 1 + (q * k) // 1 > 99,
    "extremes": lambda b, h, q, k: torch.minimum(q * k, WIDE[q]) <= torch.maximum(~(q * k), k),
    "from a number": lambda b, h, q, k: (3 - q * k) % SEVEN[0] != h,
    "by offset": lambda b, h, q, k: ((k - q) * 3 + q * k) % 5 >= 2,
    "twice the same": lambda b, h, q, k: (q * k) * (q * k) % 7 == (q * k) % 7,
}
BY_RESIDUES = {
    "sum": TAKEN["sum"],
    "documents": TAKEN["documents"],
    "differences": lambda b, h, q, k: (5 - (q * 7 - (k * 11 - OWNER[q]) + h) - 2**40) % 17 <= 4,
    "largest divisor": lambda b, h, q, k: (q * 7919 + k * 104729) % 2**15 > 2**14,
    "divided by two": lambda b, h, q, k: (q + 2 * (k // 3)) % 2 == 1,
    "at the edge": lambda b, h, q, k: ((q - 149) + (k - 329) + (INT64.max - 478)) % 1000 < 300,
    "two of them": lambda b, h, q, k: (q + 2 * k) % 5 * ((k - q * 3) % 7) + (q + 2 * k) % 5 > 9,
}
NOT_BY_RESIDUES = {
    "past the edge": lambda b, h, q, k: ((q + 2) + (k + 3) + (INT64.max - 478)) % 1000 < 300,
    "overflowing sum": TAKEN["overflowing sum"],
    "divisor of 17 bits": lambda b, h, q, k: (q * 7919 + k * 104729) % (2**15 + 1) > 2**14,
    "negative divisor": lambda b, h, q, k: (q * 7919 + k * 104729) % -13 == -2,
    "divided by one": lambda b, h, q, k: (q * 7919 + k * 104729) % 1 == 0,
    "hash": TAKEN["hash"],
    "offset": lambda b, h, q, k: ((k - q).abs() + q) % 13 < 4,
    "quotient": lambda b, h, q, k: (q * 7919 + k * 104729) // 13 % 2 == 0,
}
TAKEN |= BY_RESIDUES | NOT_BY_RESIDUES
NOT_TAKEN = {
    "divided by -1": lambda b, h, q, k: (WIDE[q] ^ k) // -1 > 5,
    "remainder of -1": lambda b, h, q, k: (q * k) % -1 == 0,
    "divided by a vector": lambda b, h, q, k: (q * k) % (k + 1) < 3,
    "divided by both": lambda b, h, q, k: 1000 // (q * k + 1) < 3,
    "shifted by a vector": lambda b, h, q, k: ((q * k) >> (k % 5)) % 2 == 0,
    "shifted out": lambda b, h, q, k: torch.bitwise_right_shift(q * k, 64) == 0,
    "a fraction": lambda b, h, q, k: (q * k) % 7 > 2.5,
    "a quotient": lambda b, h, q, k: (q * k) / 7 % 2 > 1,
    "a truth of floats": lambda b, h, q, k: (q * 0.3 + k) % 3 < 1,
    "int32": lambda b, h, q, k: (SMALL[q] * SMALL[k]) % 7 < 3,
    "int32 and int64": lambda b, h, q, k: (SMALL[q] * k + q) % 7 < 3,
    "converted": lambda b, h, q, k: (q * k).int() % 7 < 3,
    "sum of truths": lambda b, h, q, k: (q * k > 300) + (q ^ k) > 20,
    "a multiple added": lambda b, h, q, k: torch.add(q * k, k, alpha=3) % 7 < 3,
    "a multiple taken": lambda b, h, q, k: torch.sub(q * k, k, alpha=3) % 7 < 3,
    "looked up by both": lambda b, h, q, k: WIDE[(q + 2 * k) % 300] % 7 < 3,
    "where": lambda b, h, q, k: torch.where(q * k % 2 == 0, q, k) % 7 < 3,
    "power": lambda b, h, q, k: (q * k) ** 2 % 7 < 3,
}


def expected(function, h: int = 0) -> np.ndarray:
    of_head = lambda b, _, q, k: function(b, torch.tensor(h), q, k)
    return create_mask(of_head, 1, 1, Q_LEN, KV_LEN, device="cpu")[0, 0].numpy()


def computed(function, h: int = 0, device: str = "cpu") -> MixedPattern:
    found = formula_pattern(function, 0, h, Q_LEN, KV_LEN, device)
    assert isinstance(found, MixedPattern)
    return found


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken_is_what_pytorch_computes(name, monkeypatch):
    function = TAKEN[name]
    found = computed(function, 1)
    assert found.integers is not None and found.elements_at_once > pattern.Pattern.elements_at_once
    wanted = expected(function, 1)
    for at_once, threads in ((1, 1), (1 << 18, 2), (3 * 64 * 64, 2)):
        monkeypatch.setattr(integers, "AT_ONCE", at_once)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        for block, stride in (((64, 64), 1), ((16, 32), 1), ((8, 24), 3)):
            lists = list(walk(found, Q_LEN, KV_LEN, block, stride))
            compiled = BlockSparseMask.from_lists(Q_LEN, KV_LEN, block, [BlockLists.stack(lists)], [[0]], stride)
            np.testing.assert_array_equal(compiled.to_dense()[0, 0], wanted, err_msg=f"{block}, stride {stride}")


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_may_differ_is_left_to_pytorch(name):
    found = computed(NOT_TAKEN[name])
    assert found.integers is None and found.elements_at_once == pattern.Pattern.elements_at_once
    compiled = masks.from_mask_mod(NOT_TAKEN[name]).compile(Q_LEN, KV_LEN)
    np.testing.assert_array_equal(compiled.to_dense()[0, 0], expected(NOT_TAKEN[name]))


def test_sums_that_cannot_overflow_are_taken_by_residues():
    for functions, taken in ((BY_RESIDUES, True), (NOT_BY_RESIDUES, False)):
        for name, function in functions.items():
            steps = computed(function).integers.steps
            assert any(isinstance(step[0], functools.partial) for step in steps) == taken, name


def test_a_division_by_zero_is_an_error_as_before():
    with pytest.raises(MaskError, match="ZeroDivisionError"):
        masks.from_mask_mod(lambda b, h, q, k: (q * k) % 0 == 0).compile(64)


def test_another_device_computes_itself():
    assert computed(TAKEN["sum"], device="cpu:0").integers is None


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 13, 64, 97, 2654435761, INT64.max, INT64.min, -2, -3, -13, -(2**40)])
def test_remainders_of_all_sizes(divisor):
    x = torch.cat([WIDE, WIDE >> 20, WIDE >> 45, torch.arange(-200, 200), divisor * torch.arange(-5, 6) + 1])
    got = integers.remainder(x.numpy(), np.int64(divisor), np.empty(len(x), np.int64))
    np.testing.assert_array_equal(got, (x % divisor).numpy())
    np.testing.assert_array_equal(np.floor_divide(x.numpy(), np.int64(divisor)), (x // divisor).numpy())


def test_blocks_of_any_order():
    """Those of one block row are computed as one; others, and those that are ragged, each by itself."""
    found = computed(TAKEN["by offset"])
    wanted = expected(TAKEN["by offset"])
    tokens = lambda first, length: np.minimum(np.array(first)[:, None] + np.arange(16), length - 1)
    for rows, columns in (([0, 0, 0], [32, 0, 320]), ([144, 144], [0, 16]), ([0, 16, 16], [0, 0, 320]), ([7], [9])):
        i, j = tokens(rows, Q_LEN), tokens(columns, KV_LEN)
        kept = unpack_bitmap(found.bits(i, j, 1), 16, 16)
        np.testing.assert_array_equal(kept, wanted[i[:, :, None], j[:, None, :]])
