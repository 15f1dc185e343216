"""Bars, curves and roofs show the numbers they are given."""

import math

import numpy as np
import pytest

from stof_tvm import pictures
from tir_kernels.errors import InputError

POINTS = [(1, 0.5, 60.0), (4, 2.0, 48.0)]


def test_bars_have_the_length_of_the_times_and_keep_their_colour():
    cases = {"one": {"stof": 10.0, "peer": 40.0}, "two": {"peer": 1234.0}}
    figure = pictures.latency_bars(cases, "A GPU, today")
    one, two = figure.axes
    assert [bar.get_width() for bar in one.patches] == [10.0, 40.0] and [bar.get_width() for bar in two.patches] == [
        1234
    ]
    assert one.patches[1].get_facecolor() == two.patches[0].get_facecolor() != one.patches[0].get_facecolor()
    assert one.get_xlim()[0] == 0 and (one.get_title(), one.get_xlabel()) == ("one", "µs")
    assert [text.get_text() for text in one.texts] == ["10.0", "40.0"] and two.texts[0].get_text() == "1,234"
    assert [text.get_text() for text in figure.texts] == ["A GPU, today"]


@pytest.mark.parametrize("cases", [{}, {"one": {}}, {"one": {str(i): 1.0 for i in range(7)}}])
def test_bars_of_nothing_or_too_much(cases):
    with pytest.raises(InputError, match="latency bars need"):
        pictures.latency_bars(cases)


def test_one_search_is_drawn_in_microseconds():
    by_trial, by_second = pictures.tuning_curves({"bert": POINTS}).axes
    assert by_trial.lines[0].get_xydata().tolist() == [[1, 60], [4, 48]]
    assert by_second.lines[0].get_xydata().tolist() == [[0.5, 60], [2, 48]]
    assert by_trial.get_ylabel() == "best latency, µs" and by_second.get_xlabel().startswith("seconds")


def test_several_searches_are_drawn_in_multiples_of_the_best():
    by_trial, _ = pictures.tuning_curves({"small": POINTS, "large": [(1, 1.0, 900.0), (2, 2.0, 600.0)]}).axes
    curves = [line.get_ydata() for line in by_trial.lines if len(line.get_ydata()) == 2]
    assert [list(curve) for curve in curves] == [[1.25, 1.0], [1.5, 1.0]]


@pytest.mark.parametrize("searches", [{"bert": []}, {str(i): POINTS for i in range(7)}])
def test_searches_that_cannot_be_drawn(searches):
    with pytest.raises(InputError):
        pictures.tuning_curves(searches)


def test_the_roof_is_the_lower_of_memory_and_products():
    figure = pictures.roofline({"gemm": [(10.0, 2e12), (1000.0, 9e13)]}, bandwidth=1e12, peak=1e14)
    (ax,) = figure.axes
    roof, points = (line.get_xydata() for line in ax.lines)
    np.testing.assert_allclose(points, [[10, 2], [1000, 90]])
    assert all(math.isclose(y, min(x, 100.0)) for x, y in roof)
    assert roof[0, 0] < 10 and roof[-1, 0] > 1000
    assert ax.get_xscale() == ax.get_yscale() == "log"


@pytest.mark.parametrize("point", [(0.0, 1.0), (1.0, -1.0), (1.0, math.nan)])
def test_points_that_have_no_logarithm(point):
    with pytest.raises(InputError, match="above 0"):
        pictures.roofline({"gemm": [point]}, 1.0, 1.0)


def test_no_more_series_than_colours():
    with pytest.raises(InputError, match="6 series, got 7"):
        pictures.roofline({str(i): [(1.0, 1.0)] for i in range(7)}, 1.0, 1.0)
