"""Lengths that prompts are padded to."""

import pytest

from stof_tvm.errors import InputError
from stof_tvm.generation.buckets import STEP, bucket_of, buckets_to, checked


def test_default_buckets():
    assert buckets_to(600) == (64, 128, 192, 256, 320, 384, 448, 512, 600)
    assert buckets_to(2100)[-5:] == (1280, 1536, 1792, 2048, 2100)
    assert buckets_to(2) == (2,) and buckets_to(64) == (64,) and buckets_to(65) == (64, 65)


def test_little_is_padded():
    buckets = buckets_to(32768)
    for length in range(1, 32768, 37):
        padding = bucket_of(length, buckets) - length
        assert 0 <= padding < max(STEP, length / 4)
    assert len(buckets) < 40


def test_buckets_of_a_caller():
    assert checked([32, 16, 16], 64) == (16, 32) and checked(8, 64) == (8,)
    assert [bucket_of(n, (16, 32)) for n in (1, 16, 17, 32)] == [16, 16, 32, 32]
    for wrong in ([], [1], [65], [True], [8.0], True, "8"):
        with pytest.raises(InputError, match="prompt must have lengths from 2 to max_length=64, got"):
            checked(wrong, 64)
