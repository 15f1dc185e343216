"""Errors against float32 on a sample of heads and rows."""

import math

import pytest
import torch
import torch.nn.functional as F

from benchmarks.peers.accuracy import ROWS, Reference
from benchmarks.peers.patterns import Pattern


@pytest.fixture(scope="module")
def problem():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(3, 8, 300, 16, generator=generator).half()
    k, v = (torch.randn(3, 2, 300, 16, generator=generator).half() for _ in range(2))
    keep = Pattern("sliding_window-9", 300, 300).dense
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=keep, enable_gqa=True)
    return q, k, v, keep.__getitem__, exact


def test_exact_output_has_no_error_and_half_precision_some(problem):
    *operands, exact = problem
    reference = Reference(*operands)
    assert reference.error(exact) < 1e-6
    assert 1e-5 < reference.half_error < 1e-2
    assert reference.error(exact.half()) <= reference.half_error


@pytest.mark.parametrize("row", [0, 299])
def test_outermost_rows_are_in_the_sample_and_a_wrong_mask_shows(problem, row):
    q, k, v, keep, exact = problem
    assert len(Reference(q, k, v, keep).rows) == ROWS
    wrong = exact.clone()
    wrong[:, :, row] += 1
    assert Reference(q, k, v, keep).error(wrong) == pytest.approx(1, rel=1e-4)
    dense = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)
    assert Reference(q, k, v, keep).error(dense) > 0.1


def test_unwritten_element_anywhere_is_an_error(problem):
    *operands, exact = problem
    poisoned = exact.clone()
    poisoned[2, 7, 150, 3] = float("nan")
    assert math.isnan(Reference(*operands).error(poisoned))


def test_empty_rows_count_as_zero(problem):
    q, k, v, keep, _ = problem
    kept = keep(torch.arange(300)).clone()
    kept[0] = False
    out = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=kept, enable_gqa=True)
    out[:, :, 0] = 0
    assert Reference(q, k, v, kept.__getitem__).error(out) < 1e-6
