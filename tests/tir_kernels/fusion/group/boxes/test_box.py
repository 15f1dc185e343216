"""Which domains are cut into boxes, how, and that every permutation of every dtype arrives whole."""

import math

import numpy as np
import pytest

from tests.gpu.group_cases import (
    Builder,
    cut_and_merged,
    gated_halves,
    padded_rows,
    parts_of_sums,
    plus_transposed,
    transposed,
)
from tests.tir_kernels.fusion.group.group_emulation import assert_right
from tests.tir_kernels.fusion.row_emulation import needs_gxx
from tir_kernels.fusion.group.boxes.box import MOST_BYTES, RUNS, Box, box_of
from tir_kernels.fusion.group.domains import domains_of

LENGTHS = (1, 2, 3, 5, 7, 8, 16, 21, 33, 40, 64, 100, 129)
DTYPES = ("float16", "bfloat16", "float32", "int8", "uint8", "bool", "int16", "int32", "int64", "float64")


def boxes(problem) -> list[Box | None]:
    return [box_of(problem, domain) for domain in domains_of(problem)]


def the_box(problem) -> Box:
    (box,) = boxes(problem)
    assert box is not None
    return box


def random_copy(seed: int):
    """A permutation of a tensor of random lengths, some cut before and some reshaped after it."""
    rng = np.random.default_rng(seed)
    shape = [int(n) for n in rng.choice(LENGTHS, rng.integers(2, 5))]
    while math.prod(shape) > 20000:
        shape[int(np.argmax(shape))] //= 2
    b = Builder((tuple(shape), str(rng.choice([x for x in DTYPES if x != "uint8"]))))
    x, rank = 0, len(shape)
    if rng.random() < 0.3:
        axis = int(rng.integers(rank))
        x = b.cut(x, axis, int(rng.integers((shape[axis] + 1) // 2)), shape[axis])
    x = b.permute(x, *map(int, rng.permutation(rank)))
    if rng.random() < 0.3:
        found, axis = b.of(x).shape, int(rng.integers(rank - 1))
        x = b.reshape(x, *found[:axis], found[axis] * found[axis + 1], *found[axis + 2 :])
    return b.problem(x)


@needs_gxx
@pytest.mark.parametrize("seed", range(24))
def test_random_copies(seed, tmp_path):
    assert_right(random_copy(seed), tmp_path, seed=seed)


@needs_gxx
@pytest.mark.parametrize(
    "problem",
    [
        plus_transposed((2, 27, 27)),
        plus_transposed((2, 27, 27), "float32"),
        cut_and_merged((2, 20, 5, 33)),
        transposed((1, 129, 97), (0, 2, 1), "int8"),
        transposed((2, 3, 200), (0, 2, 1)),
        transposed((2, 200, 32), (0, 2, 1), "bfloat16"),
        parts_of_sums(2),
    ],
    ids=["plus transposed", "float32", "cut", "int8", "narrow", "narrow and even", "parts"],
)
def test_computes_what_pytorch_computes(problem, tmp_path):
    assert_right(problem, tmp_path)


def test_a_box_is_long_along_both_sides():
    box = the_box(transposed((64, 1024, 768), (0, 2, 1)))
    assert (box.extents, box.out_axes, box.in_axes, box.is_aligned) == ((1, 64, 64), (2,), (1,), True)
    assert box.reads[0].position.strides == (1024 * 768, 1, 768) and box.source_run(box.reads[0]) == [1]
    reverse = the_box(transposed((32, 48, 64, 80), (3, 2, 1, 0)))
    assert (reverse.extents, reverse.out_axes, reverse.run) == ((80, 1, 2, 32), (2, 3), 64)


def test_images_are_moved_in_whole_pixels():
    """Three channels and a row: both sides' runs are along the same axes, and the box is longer along these."""
    box = the_box(transposed((64, 3, 512, 512), (0, 2, 3, 1)))
    assert box.extents == (1, 2, 512, 3) and math.prod(box.extents) >= RUNS[2] ** 2 // 2


def test_every_box_lies_once_in_the_order_of_ctas():
    for problem in (transposed((3, 213, 327), (0, 2, 1)), transposed((5, 33, 7, 61), (3, 2, 1, 0), "int8")):
        box = the_box(problem)
        counts = dict.fromkeys(range(len(box.shape)), 1)
        for axis, count in box.order:
            counts[axis] *= count
        assert all(counts[axis] >= n for axis, n in enumerate(box.counts))
        assert (
            sum(counts[axis] - n for axis, n in enumerate(box.counts))
            == counts[box.out_axes[0]] - (box.counts[box.out_axes[0]])
        )


def test_rows_of_a_tile_are_odd():
    """Neighbours of the source, which threads store together, then lie in different banks."""
    for shape, axes in (((4, 512, 512), (0, 2, 1)), ((40, 1000, 32), (0, 2, 1)), ((9, 40, 6, 64), (0, 3, 2, 1))):
        for dtype, size in (("float16", 2), ("float32", 4), ("int8", 1), ("int64", 8)):
            box = the_box(transposed(shape, axes, dtype))
            (along, *_) = box.source_run(box.reads[0])
            assert box.tile_strides(size)[along] % 2 == 1 and box.shared_bytes <= MOST_BYTES


def of_rolled():
    b = Builder(((4, 24, 40), "float16"))
    x = b.add("roll", 0, shape=(4, 24, 40), numbers=(2, 3))
    return b.problem(b.permute(x, 0, 2, 1))


@pytest.mark.parametrize(
    "problem",
    [
        transposed((3, 29, 6, 64), (0, 2, 1, 3)),  # rows of whole vectors
        gated_halves(40),
        transposed((1, 1, 77, 13), (1, 0, 2, 3)),  # the same order
        of_rolled(),  # no affine position
        transposed((2, 24, 40), (0, 1, 2), "int64"),
    ],
    ids=["heads", "halves", "flat", "rolled", "contiguous"],
)
def test_what_vectors_read_as_well_has_no_boxes(problem):
    assert boxes(problem) == [None]


def test_parts_that_are_read_under_a_condition():
    """A convolution's rows: each place of the kernel is a part, staged where the box holds some of it."""
    box = the_box(padded_rows(16, 40, 3, 1))
    assert len(box.reads) == 3 and all(len(read.guards) == 2 for read in box.reads)
    assert boxes(padded_rows(9, 31, 5, 1)) == [None]  # parts that vectors cross


def read_in_two_branches():
    """A transposition in one part of each of two concatenations, of which whole vectors lie in one part."""
    b = Builder(((16, 24), "float16"), ((24, 16), "float16"))
    x = b.permute(0, 1, 0)
    relu, negative = (b.concat(0, b.add(name, x), 1) for name in ("relu", "negative"))
    return b.problem(b.add("add", relu, negative))


@needs_gxx
def test_what_is_staged_is_read_again_in_another_branch(tmp_path):
    problem = read_in_two_branches()
    assert the_box(problem).reads[0].guards
    assert_right(problem, tmp_path)
