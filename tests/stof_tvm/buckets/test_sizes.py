"""The sizes of buckets: few, close to one another, and those that a user gives."""

import math

import pytest

from stof_tvm.buckets.sizes import MOST, combinations, default_sizes, given_sizes, smallest_fit
from stof_tvm.errors import InputError

RANGES = [{"n": (1, 512)}, {"n": (2, 64)}, {"n": (1, 4096)}, {"b": (1, 8), "n": (1, 512)}, {"b": (1, 4)}, {"n": (5, 5)}]


@pytest.mark.parametrize("limits", RANGES, ids=str)
def test_default_sizes_cover_the_range(limits):
    sizes = default_sizes(limits)
    assert math.prod(map(len, sizes.values())) <= MOST
    for name, (least, most) in limits.items():
        assert sizes[name] == tuple(sorted({*sizes[name]})) and sizes[name][-1] == most
        assert (1 in sizes[name]) == (least == 1) and sizes[name][0] >= least


def test_a_single_size_grows_little():
    sizes = [n for n in default_sizes({"n": (1, 512)})["n"] if n >= 128]
    assert all(b / a <= 1.08 or b - a == 16 for a, b in zip(sizes, sizes[1:]))
    assert all(n % 16 == 0 for n in sizes)
    sizes = default_sizes({"n": (128, 4096)})["n"]
    assert len(sizes) <= MOST and all(b / a <= 1.1 or b - a == 16 for a, b in zip(sizes, sizes[1:]))


def test_two_sizes_share_the_number_of_engines():
    sizes = default_sizes({"b": (1, 8), "n": (1, 512)})
    assert len(combinations(sizes)) == len(sizes["b"]) * len(sizes["n"]) <= MOST
    assert combinations(sizes)[0] == {"b": 8, "n": 512}


def test_the_smallest_size_that_fits():
    assert [smallest_fit((1, 16, 64), n) for n in (1, 2, 16, 17, 64)] == [1, 16, 16, 64, 64]


def test_given_sizes():
    one, names = {"n": (1, 64)}, {"n": ["ids[1]", "length"]}
    assert given_sizes([8, 32], one, names) == {"n": (1, 8, 32, 64)}
    assert given_sizes({"length": (64,)}, one, names) == {"n": (1, 64)}
    assert given_sizes(None, one, names) == default_sizes(one)
    two, names = {"b": (2, 4), "n": (1, 64)}, {"b": ["ids[0]"], "n": ["ids[1]"]}
    chosen = given_sizes({"ids[1]": [32]}, two, names)
    assert chosen["n"] == (1, 32, 64) and chosen["b"][-1] == 4


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([8], r"buckets=\[8\]: 2 sizes may change, give a dict of 'ids\[0\]', 'ids\[1\]'"),
        ({"ids[2]": [8]}, r"buckets has 'ids\[2\]'; the sizes that may change are 'ids\[0\]', 'ids\[1\]'"),
        ({"ids[1]": 8}, r"buckets\['ids\[1\]'\] must be a sequence of sizes, got 8"),
        ({"ids[1]": []}, "must be a sequence of sizes"),
        ({"ids[1]": [8, 65]}, r"buckets\['ids\[1\]'\] has 65; ids\[1\] is 1 to 64"),
        ({"ids[1]": [8.0]}, "has 8.0"),
    ],
)
def test_sizes_that_are_none(given, told):
    with pytest.raises(InputError, match=told):
        given_sizes(given, {"b": (2, 4), "n": (1, 64)}, {"b": ["ids[0]"], "n": ["ids[1]"]})
