"""The suites of products that the sweep times: each has cases, whose configurations the compiler knows."""

import pytest

from benchmarks import gemm_suites


@pytest.mark.parametrize("name", gemm_suites.SUITES)
def test_a_suite_has_cases(name):
    assert list(gemm_suites.SUITES[name]())
