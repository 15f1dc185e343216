"""Places of rows through reshapes, against the elements themselves."""

import numpy as np
import pytest

from relax_passes.read_rows.places import Digit, NotMoved, Place

ROWS = 6


def taken(x, place: Place, row: int) -> np.ndarray:
    """The elements of a row, in order."""
    sizes, apart = place.apart(x.shape)
    return x.reshape(sizes).take([row], apart.rows.axis).reshape(place.narrowed(x.shape, 1))


@pytest.mark.parametrize(
    ("old", "place", "new", "expected"),
    [
        ((4, 6, 8), Place(Digit(1, 6)), (4, 6, 2, 4), Place(Digit(1, 6))),
        ((4, 6, 8), Place(Digit(1, 6)), (24, 8), Place(Digit(0, 6, 4))),
        ((24, 8), Place(Digit(0, 6, 4)), (4, 6, 8), Place(Digit(1, 6))),
        ((4, 6, 8), Place(Digit(1, 6)), (4, 48), Place(Digit(1, 6))),
        ((4, 48), Place(Digit(1, 6)), (4, 1, 6, 8), Place(Digit(2, 6))),
        ((4, 6, 8), Place(Digit(1, 6)), (192,), Place(Digit(0, 6, 4))),
        ((24, 8), Place(Digit(0, 6, 4), Digit(0, 4)), (4, 6, 8), Place(Digit(1, 6), Digit(0, 4))),
        ((1, 6, 8), Place(Digit(1, 6)), (6, 8), Place(Digit(0, 6))),
        ((4, 6), Place(Digit(1, 6)), (2, 2, 6), Place(Digit(2, 6))),
        ((4, 6, 8), Place(Digit(1, 6)), (4, 12, 4), Place(Digit(1, 6))),
    ],
)
def test_the_rows_of_a_reshaped_tensor(old, place, new, expected):
    assert place.reshaped(old, new) == expected
    x = np.arange(np.prod(old)).reshape(old)
    for row in range(ROWS):
        assert np.array_equal(taken(x, place, row).ravel(), taken(x.reshape(new), expected, row).ravel())


@pytest.mark.parametrize(
    ("old", "place", "new"),
    [
        ((4, 6, 8), Place(Digit(1, 6)), (4, 3, 2, 8)),  # rows in two axes
        ((4, 6, 8), Place(Digit(1, 6)), (8, 24)),
        ((4, 6, 8), Place(Digit(1, 6), Digit(0, 4)), (2, 2, 6, 8)),  # entries of the batch in two axes
        ((6, 8), Place(Digit(0, 6)), (8, 6)),
    ],
)
def test_rows_that_a_reshape_mixes(old, place, new):
    with pytest.raises(NotMoved):
        place.reshaped(old, new)


def test_rows_and_batch_are_axes_apart():
    place = Place(Digit(1, 6, 8), Digit(1, 4, 2))
    assert place.apart((3, 96, 5)) == ((3, 2, 4, 6, 2, 5), Place(Digit(3, 6), Digit(2, 4)))
    assert place.narrowed((3, 96, 5), 2) == (3, 32, 5)
