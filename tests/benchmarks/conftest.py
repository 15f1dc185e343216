"""Makes the benchmarks importable, and builds result rows."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, density=0.1, **fields):
        row = {
            "bench": case.bench, "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-21", "commit": "abc",
            "run": "one", "case": case.to_json(density), "system": system,
        }  # fmt: skip
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us + 10, "samples_us": [us], "error": 1e-4}
            row |= {"half_error": 2e-4}
        return row | fields

    return make
