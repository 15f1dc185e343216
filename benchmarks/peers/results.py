"""Result rows: written, read, and looked up by case and system."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.peers.cases import WITHIN_CAUSAL, Case

ERROR_FACTOR = 2  # an output may be this many times as wrong as PyTorch's in half precision
BANDWIDTH = 4.3e12  # bytes a second: a large device-to-device copy on an H200
MATRIX_RATE = 790e12  # half-precision FLOP a second: a large matrix product there


class Results:
    """The newest row of each case and system."""

    def __init__(self, rows: Iterable[dict]):
        self.rows: dict[tuple[Case, str], dict] = {}
        self.densities: dict[Case, float] = {}
        for row in sorted(rows, key=lambda row: row["date"]):  # stable: of the same day, the last file's
            case = Case.from_row(row)
            self.rows[case, row["system"]] = row
            if row["case"]["density"] is not None:
                self.densities[case] = row["case"]["density"]

    def us(self, case: Case, system: str) -> float | None:
        """The median, or None where the system was not run, failed, or is wrong."""
        row = self.rows.get((case, system))
        return row["median_us"] if row is not None and is_correct(row) else None

    def peers(self, case: Case, bounds: bool = True) -> dict[str, float]:
        """Microseconds of every other system that computes this mask, by name.

        With `bounds` also those that compute more because they cannot express it, a dense kernel, and a causal one
        where the mask lies within: their names end in " (dense)" and " (causal)".
        """
        found = {system: self.us(case, system) for at, system in self.rows if at == case}
        if bounds and case.mask != "none":
            covers = [("none", "dense")]
            if case.mask in WITHIN_CAUSAL and case.mask != "causal":
                covers.append(("causal", "causal"))
            for mask, word in covers:
                other = case.with_mask(mask)
                dense_kernels = ("fa2", "cudnn", "fa4", "fa2-causal", "cudnn-causal")
                found |= {
                    f"{s} ({word})": self.us(other, s) for at, s in self.rows if at == other if s in dense_kernels
                }
        return {system: us for system, us in found.items() if us is not None and not system.startswith("stof")}

    def cases(self) -> list[Case]:
        return sorted({case for case, _ in self.rows})


def is_correct(row: dict) -> bool:
    """Whether the system ran and its error is within ERROR_FACTOR of PyTorch's in half precision (NaN is not)."""
    return "failed" not in row and row["error"] <= ERROR_FACTOR * row["half_error"]


def best(peers: dict[str, float]) -> tuple[str, float] | None:
    """Name and time of the fastest."""
    return min(peers.items(), key=lambda item: item[1]) if peers else None


def useful_tflops(case: Case, density: float, us: float) -> float:
    """4 D FLOP for each kept element, over the time."""
    return 4 * case.head_dim * density * case.q_len * case.kv_len * case.batch * case.heads / us / 1e6


def bytes_moved(case: Case, density: float) -> float:
    """Operands and output once through memory; of a decoding case's keys and values the kept ones only."""
    kv_share = density if case.q_len == 1 else 1
    elements = 2 * case.heads * case.q_len + 2 * case.kv_heads * case.kv_len * kv_share
    return 2 * case.batch * case.head_dim * elements


def floor_us(case: Case, density: float) -> float:
    """The least time an H200 needs: what must be moved through its memory, or kept products."""
    memory = bytes_moved(case, density) / BANDWIDTH * 1e6
    return max(memory, useful_tflops(case, density, 1.0) * 1e12 / MATRIX_RATE)


def read_rows(paths: Iterable[Path]) -> list[dict]:
    """The rows of several files, in order."""
    return [row for path in paths for row in json.loads(Path(path).read_text())]


def write_rows(path: Path, rows: list[dict]) -> None:
    """One row a line, so that diffs stay readable; a process that is killed meanwhile leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(f"[\n{lines}\n]\n")
    unfinished.replace(path)
