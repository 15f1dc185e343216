"""FastVideo's block-sparse kernel as a peer: its lists, and what it refuses."""

from dataclasses import replace

import pytest
import torch

from benchmarks.peers.accuracy import Reference
from benchmarks.peers.cases import Case
from benchmarks.peers.fastvideo import prepare
from benchmarks.peers.patterns import Pattern

CASE = Case("attention", 1, 4, 2, 1024, 1024, 64, "random_tiles-0.25", "bfloat16")


@pytest.mark.parametrize("mask, length", [("random_tiles-0.25", 1024), ("video", 96 * 64)])
def test_the_kernel_is_given_the_mask(mask, length, fastvideo):
    case = replace(CASE, q_len=length, kv_len=length, mask=mask, heads=1 + (length == 1024), kv_heads=1)
    pattern = Pattern(mask, length, length)
    ready = prepare("fastvideo", case, pattern, "cpu")
    q, k, v = (torch.randn(1, n, length, 64).bfloat16() for n in (case.heads, 1, 1))
    reference = Reference(q, k, v, pattern.rows)
    assert reference.error(ready.call(q, k, v)) <= 2 * reference.half_error and "64x64" in ready.variant


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"dtype": "float16"}, "takes bfloat16, heads of 64 or 128 and batch 1, not float16"),
        ({"head_dim": 80}, "heads of 80"),
        ({"batch": 2}, "batch 2"),
        ({"q_len": 1000}, "lengths 1000 and 1024 are no multiples of 64"),
        ({"mask": "causal"}, "'causal' is not of whole blocks of 64"),
        ({"mask": "full_blocks"}, "rows that keep nothing"),
    ],
)
def test_what_it_does_not_compute_is_refused(fields, words, fastvideo):
    case = replace(CASE, **fields)
    with pytest.raises(RuntimeError, match=words):
        prepare("fastvideo", case, Pattern(case.mask, case.q_len, case.kv_len), "cpu")


def test_a_missing_package_is_an_import_error():
    with pytest.raises(ImportError):
        prepare("fastvideo", CASE, Pattern(CASE.mask, 1024, 1024), "cpu")
