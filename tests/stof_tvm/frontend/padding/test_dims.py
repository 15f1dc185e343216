"""Dimensions with padding: how views regroup them, and which sizes grow with the inputs."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min

from stof_tvm.frontend.padding.dims import grows, is_first, is_negative, joined, length, regrouped, same

B, N = sympy.symbols("b n", integer=True, positive=True)


def test_a_number_joins_the_size_outside_of_it():
    assert joined([B, 4]) == (4 * B,) and joined([1, 3, 1, 2]) == (6,) and joined([1]) == ()
    assert joined([4, N]) == (4, N) and joined([4, N, 2]) == (4, 2 * N)
    assert length(joined([B, N, 2])) == 2 * B * N
    assert is_first(joined([N, 3])) and not is_first(joined([3, N]))
    assert same((2 * (N + 1),), (2 * N + 2,)) and not same((2, N), (2 * N,))


@pytest.mark.parametrize(
    ("dims", "sizes", "expected"),
    [
        ([(B,), (N,), (6,)], [B * N, 6], [(B, N), (6,)]),
        ([(B, N), (6,)], [B, N, 6], [(B,), (N,), (6,)]),
        ([(B,), (N,), (6,)], [B, 6 * N], [(B,), (6 * N,)]),
        ([(B,), (6 * N,)], [B, N, 2, 3], [(B,), (N,), (2,), (3,)]),
        ([(B,), (6 * N,)], [B, 2 * N, 3], [(B,), (2 * N,), (3,)]),
        ([(B,), (2,), (N,), (3,)], [2 * B, N, 3], [(2 * B,), (N,), (3,)]),
        ([(B,), (2,), (N,), (3,)], [B, 2 * N, 3], [(B,), (2, N), (3,)]),
        ([(B,), (N,), (4,), (6,)], [B, 1, N, 24], [(B,), (), (N,), (24,)]),
        ([(6,), (4,)], [8, 3], [(8,), (3,)]),
    ],
)
def test_views(dims, sizes, expected):
    assert [dim for dim, _ in regrouped(dims, sizes)] == expected


@pytest.mark.parametrize(
    ("dims", "sizes"),
    [
        ([(6 * N,)], [6, N]),  # the second half of every six would be padding
        ([(B,), (N,)], [N, B]),
        ([(2, N)], [N, 2]),
        ([(B,), (2, N)], [2 * B, N, 2]),
        ([(2 * N,)], [2, N]),
    ],
)
def test_views_that_would_mix_padding(dims, sizes):
    assert regrouped(dims, sizes) is None


@pytest.mark.parametrize(
    "size", [7, N, B * N, 3 * N + 1, FloorDiv(N + 1, 2), Min(N, 10), Max(N - 3, 0), (N - 1) * B, N**2]
)
def test_sizes_that_grow(size):
    assert grows(size, {N: 1, B: 1})


@pytest.mark.parametrize("size", [10 - N, N % 4, FloorDiv(10, N), (N - 4) * B, -N + B, FloorDiv(N, B), (N - 5) ** 2])
def test_sizes_that_may_shrink(size):
    assert not grows(size, {N: 1, B: 1})


def test_the_sign_of_a_number_over_a_range():
    least, most = {N: 2, B: 1}, {N: 60, B: 8}
    assert is_negative(-N, least, most) is True
    assert is_negative(N - 2, least, most) is False
    assert is_negative(N - FloorDiv(N, 2), least, most) is False  # by trying them: its bounds alone do not say
    assert is_negative(N - 3, least, most) is None
    assert is_negative(B - N, least, most) is None
    assert is_negative(B * N - B, least, {N: 9000, B: 8}) is None  # too many to try
