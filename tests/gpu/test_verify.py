"""What the check on a GPU lets pass: infinities and NaN allow no error elsewhere."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from verify import largest_difference, largest_finite  # noqa: E402


def test_an_infinity_among_results_allows_no_error_of_the_others():
    expected = torch.tensor([1.0, float("inf"), float("nan"), -3.0])
    assert largest_finite(expected) == 3.0 and largest_finite(expected[1:3]) == 0.0


def test_a_result_differs_by_its_largest_error_or_by_being_no_number():
    expected = torch.tensor([1.0, float("inf"), float("nan"), -3.0])
    assert largest_difference(expected, expected, torch.float64) == 0.0
    for place, wrong in ((0, float("nan")), (2, 0.0), (1, float("nan"))):
        found = expected.clone()
        found[place] = wrong
        assert not largest_difference(found, expected, torch.float64) <= 1e9
    assert largest_difference(torch.tensor([1, 2]), torch.tensor([1, 3]), torch.float64) == 1.0
