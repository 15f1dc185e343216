"""Rows of the benchmarks of whole models, looked up by case and system."""

from collections.abc import Iterable

from benchmarks.models.cases import ModelCase
from benchmarks.models.systems import OURS
from benchmarks.peers.results import is_correct


class ModelResults:
    """The newest row of each case and system."""

    def __init__(self, rows: Iterable[dict], case_type: type = ModelCase):
        self.rows: dict[tuple[ModelCase, str], dict] = {}  # or of another type
        for row in sorted(rows, key=lambda row: row["date"]):  # stable: of the same day, the last file's
            self.rows[case_type.from_row(row), row["system"]] = row

    def us(self, case: ModelCase, system: str, field: str = "median_us") -> float | None:
        """A time, or None where the system was not run, failed, or is wrong."""
        row = self.rows.get((case, system))
        return row[field] if row is not None and is_correct(row) else None

    def peers(self, case: ModelCase) -> dict[str, float]:
        """Microseconds of every system that is not ours."""
        found = {system: self.us(case, system) for at, system in self.rows if at == case}
        return {system: us for system, us in found.items() if us is not None and not system.startswith(OURS)}

    def cases(self) -> list[ModelCase]:
        return sorted({case for case, _ in self.rows})
