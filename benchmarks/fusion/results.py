"""Rows of the fusion benchmark, looked up by case and system, and the least time that a case needs."""

from collections.abc import Iterable

from benchmarks.fusion.cases import FusionCase
from benchmarks.fusion.torch_systems import PARTIAL
from benchmarks.peers.results import BANDWIDTH, MATRIX_RATE, is_correct

OURS = "stof"


class FusionResults:
    """The newest row of each case and system."""

    def __init__(self, rows: Iterable[dict]):
        self.rows: dict[tuple[FusionCase, str], dict] = {}
        for row in sorted(rows, key=lambda row: row["date"]):  # stable: of the same day, the last file's
            self.rows[FusionCase.from_row(row), row["system"]] = row

    def us(self, case: FusionCase, system: str) -> float | None:
        """The median, or None where the system was not run, failed, or is wrong."""
        row = self.rows.get((case, system))
        return row["median_us"] if row is not None and is_correct(row) else None

    def predicted_us(self, case: FusionCase, system: str) -> float | None:
        return self.rows.get((case, system), {}).get("predicted_us")

    def peers(self, case: FusionCase) -> dict[str, float]:
        """Microseconds of every system that is not ours and computes the whole case."""
        found = {
            s: self.us(case, s) for at, s in self.rows if at == case and not s.startswith(OURS) and s not in PARTIAL
        }
        return {system: us for system, us in found.items() if us is not None}

    def cases(self, template: str | None = None) -> list[FusionCase]:
        return sorted({case for case, _ in self.rows if template in (None, case.template)})


def memory_us(case: FusionCase) -> float:
    """Inputs and output once through an H200's memory."""
    return case.bytes_moved / BANDWIDTH * 1e6


def matrix_us(case: FusionCase) -> float:
    """The products at an H200's measured rate of them."""
    return case.flops / MATRIX_RATE * 1e6


def floor_us(case: FusionCase) -> float:
    return max(memory_us(case), matrix_us(case))
