"""More than a few rows of long sequences are full tiles; where most are read, all are computed."""

import pytest
import torch

from stof_tvm import masks
from tests.relax_passes.read_rows.layers import WIDTH
from tests.relax_passes.read_rows.test_compute_reached_rows import Deep, given, last, program, sizes

LENGTH = 4096


class Long(Deep):
    """The layers, with tables for more positions."""

    def __init__(self, select, length):
        super().__init__(select)
        for layer in self.layers:
            layer.cos, layer.sin = (x.repeat(length // len(x), 1) for x in (layer.cos, layer.sin))


def found(select, window: int, length: int = LENGTH) -> list[tuple]:
    """(queries, keys, first row) of each attention."""
    mask, example = masks.sliding_window(window, causal=True), (torch.zeros(1, length, WIDTH), torch.tensor([4000, 2]))
    return [sizes(call) for call in program(Long(select, length), mask, example)[0]]


@pytest.mark.parametrize("select", [last, given(4000, LENGTH - 1)])
def test_more_than_a_few_rows_are_full_tiles(select):
    """Up to 512 are as many as are needed, for tiles of 64 would be more work than they save."""
    assert found(select, 200) == [(401, 640, 239), (201, 401, 200), (1, 201, 200)]
    assert found(select, 511) == [(1024, 1536, 512), (512, 1024, 512), (1, 512, 511)]
    assert found(select, 512) == [(1088, 1600, 512), (576, 1088, 512), (1, 576, 575)]


def test_tiles_do_not_begin_before_the_first_row():
    read = lambda x, index: x[:, 1023:1024]
    assert found(read, 400) == [(832, 1024, 192), (401, 832, 431), (1, 401, 400)]
    assert found(lambda x, index: x[:, 599:600], 550) == [(600, 600, 0), (576, 600, 24), (1, 576, 575)]


def test_rows_before_the_least_one_of_run_time():
    """Where full tiles may begin before the first row, there are as many rows as there can be.

    Where keys may lie before it, a layer has all of them, and all queries: each of many rows that are given at run time
    would read its keys by itself.
    """
    for least, keys in ((1023, 1024), (1010, 1011), (1000, 1001)):
        expected = [(LENGTH, LENGTH, None), (501, keys, keys - 501), (1, 501, 500)]
        assert found(given(least, 1200), 500) == expected


def test_few_rows_of_which_keys_may_lie_before_the_first():
    """As many as 128 have a kernel that reads which rows they are."""
    assert found(given(150, 1200), 127) == [(LENGTH, LENGTH, None), (128, LENGTH, None), (1, 128, 127)]
    assert found(given(150, 1200), 128) == [(LENGTH, LENGTH, None), (LENGTH, LENGTH, None), (1, 129, 128)]


def test_keys_before_the_first_row():
    assert [keys for _, keys, _ in found(given(999, 1200), 500)] == [LENGTH, LENGTH, 501]


def test_no_large_bias_is_made_of_a_mask():
    """Causality of thousands of rows of run time would be a bias of as many rows and all keys."""
    assert found(given(4095, 8000), 2000, 8192)[0] == (8192, 8192, None)


def test_most_rows_are_all():
    """Values of which more than 15/16 is read are whole; the last attention has the keys before its row."""
    at_row = lambda row: lambda x, index: x[:, row : row + 1]
    assert [keys for _, keys, _ in found(at_row(3839), 1 << 11)] == [3840, 3840, 2112]
    assert [keys for _, keys, _ in found(at_row(3840), 1 << 11)][0] == LENGTH
