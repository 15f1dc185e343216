"""Rows of the products' benchmark, looked up by case and system, and what products must reach."""

from collections.abc import Iterable

from benchmarks.models.results import ModelResults
from benchmarks.peers.results import MATRIX_RATE
from benchmarks.peers.targets import Line
from benchmarks.products.cases import ProductCase

OURS, BEST = "stof", "stof-best"
CUBLAS, ALONE = "cublas", "cublas-alone"  # what the case computes; the product without its bias
WITHIN = 0.97  # of cuBLAS's speed, everywhere


class ProductResults(ModelResults):
    """The newest row of each case and system."""

    def __init__(self, rows: Iterable[dict]):
        super().__init__(rows, ProductCase)

    def peers(self, case: ProductCase) -> dict[str, float]:
        """Microseconds of cuBLAS where it computes the whole case."""
        us = self.us(case, CUBLAS)
        return {} if us is None else {CUBLAS: us}


def lines(results: ProductResults) -> list[Line]:
    """The table of requirements, computed; ratios are the other's time over ours."""
    cases = results.cases()
    kinds = {
        "every product": cases,
        "(for information) one matrix, columns a multiple of 8": [c for c in cases if c.batch == 1 and c.n % 8 == 0],
        "(for information) columns no multiple of 8": [c for c in cases if c.n % 8],
        "(for information) several matrices": [c for c in cases if c.batch > 1],
    }
    found = [_line(results, what, "cuBLAS", some, CUBLAS, OURS) for what, some in kinds.items()]
    found[0].everywhere = WITHIN
    biased = [case for case in cases if case.bias]
    found.append(_line(results, "(for information) with a bias", "cuBLAS without it", biased, ALONE, OURS))
    swept = [case for case in cases if (case, BEST) in results.rows]
    found.append(
        _line(results, "(for information) the choice of the time model", "the best measured", swept, BEST, OURS)
    )
    found.append(_line(results, "(for information) the best measured configuration", "cuBLAS", swept, CUBLAS, BEST))
    return found


def _line(results: ProductResults, what: str, against: str, cases: list, other: str, ours: str) -> Line:
    line = Line(what, against)
    for case in cases:
        theirs = results.us(case, other)
        if theirs is None or (case, ours) not in results.rows:
            line.missing.append(case)
        else:
            us = results.us(case, ours)
            line.ratios[case] = theirs / us if us is not None else 0.0
    return line


def matrix_us(case: ProductCase) -> float:
    """The product at an H200's measured rate of large ones."""
    return case.flops / MATRIX_RATE * 1e6
