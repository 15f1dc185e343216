"""Of long sequences, more than a few rows are full tiles; of most rows, all are computed."""

import pytest
import torch

from stof_tvm import masks
from tests.relax_passes.read_rows.layers import WIDTH
from tests.relax_passes.read_rows.test_compute_reached_rows import Deep, given, last, program, sizes

LENGTH = 4096
X = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0)), torch.tensor([4000, 2])


class Long(Deep):
    """Of more positions than the layers' tables have."""

    def __init__(self, select):
        super().__init__(select)
        for layer in self.layers:
            layer.cos, layer.sin = (x.repeat(LENGTH // len(x), 1) for x in (layer.cos, layer.sin))


def found(select, window: int) -> list[tuple]:
    """(queries, keys, first row) of each attention."""
    mask = masks.sliding_window(window, causal=True)
    return [sizes(call) for call in program(Long(select), mask, X)[0]]


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


def test_tiles_before_the_least_row_of_run_time():
    """Where full tiles may begin before the first row, there are as many rows as there can be."""
    whole = LENGTH, LENGTH, None
    assert found(given(1023, 1200), 500) == [whole, (501, 1024, 523), (1, 501, 500)]
    assert found(given(1010, 1200), 500) == [whole, (501, 1011, 510), (1, 501, 500)]
    assert found(given(1000, 1200), 500) == [whole, (501, 1001, 500), (1, 501, 500)]
    assert found(given(999, 1200), 500)[1] == whole


def test_most_rows_are_all():
    """From 15 of 16 on, values are whole; the last attention has the keys before the row that is read."""
    at_row = lambda row: lambda x, index: x[:, row : row + 1]
    assert [keys for _, keys, _ in found(at_row(3839), 1 << 11)] == [3840, 3840, 2112]
    assert [keys for _, keys, _ in found(at_row(3840), 1 << 11)][0] == LENGTH
