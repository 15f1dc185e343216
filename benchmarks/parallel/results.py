"""Rows of tensor parallelism: which are right, in a line, merged to a page."""

from pathlib import Path

from benchmarks.parallel.cases import Case
from benchmarks.peers.newest import merge_newest
from benchmarks.peers.results import is_correct

BENCH = "parallel"


def line(row: dict) -> str:
    """A row in a line."""
    found = f"{row['case']['name']:<8} {row['system']:<16} "
    if "failed" in row:
        return f"{found}failed, {row['failed'][:200]}"
    if not is_correct(row):
        return f"{found}WRONG, {row['error']}, PyTorch {row['half_error']}"
    return f"{found}{row['median_us']:.0f} µs on {row['gpus']}, ready after {row['prepare_s']:.0f} s"


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/parallel.json and .md of the files' rows; the newest counts of a case, a system and so many GPUs."""
    return merge_newest(paths, folder, BENCH, page, ("ranks", "system"))


def page(rows: list[dict]) -> str:
    """The table of one GPU's rows: a line for each case, on so many GPUs."""
    names = (
        "model", "call", "GPUs", "one GPU, µs", "all, µs", "speedup", "predicted", "DTensor and torch.compile, µs",
        "DTensor over ours",
    )  # fmt: skip
    lines = ["# A model that GPUs divide", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    cases = {(Case(**row["case"]), row["ranks"]) for row in rows}
    for case, ranks in sorted(cases, key=lambda at: (at[0].model, at[0].layers, at[0].cache, at[0].batch, at[1])):
        found = {
            row["system"]: row
            for row in rows
            if (Case(**row["case"]), row["ranks"]) == (case, ranks) and is_correct(row)
        }
        us = {system: row["median_us"] for system, row in found.items()}
        guesses = {system: (row.get("predicted") or {}).get("us") for system, row in found.items()}
        cells = [
            case.sizes, case.call, str(ranks), _us(us, "stof-1"), _us(us, "stof"), _ratio(us, "stof-1", "stof"),
            _ratio(guesses, "stof-1", "stof"), _us(us, "compile-dtensor"), _ratio(us, "compile-dtensor", "stof"),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    guessed = [row for row in rows if is_correct(row) and row.get("predicted")]
    predictions = [
        f"- {row['case']['name']} of {Case(**row['case']).sizes}, on {row['gpus']}: {row['predicted']['us']:.0f} µs "
        f"predicted, {row['median_us']:.0f} µs measured ({row['predicted']['us'] / row['median_us'] - 1:+.0%})"
        for row in guessed
    ]
    told = [f"- `stof plan` of {row['case']['name']}: {row['predicted']['advice']}." for row in guessed]
    predictions += dict.fromkeys(text for row, text in zip(guessed, told) if row["gpus"] > 1)
    failed = [f"- {line(row)}" for row in rows if not is_correct(row)]
    facts = {f"{row['gpu']}, driver {row['driver']}, {row['date']}, commit {row['commit']}." for row in rows}
    parts = [["Predictions of `stof plan`:", "", *predictions] if predictions else [], failed, sorted(facts)]
    return "\n".join([*lines, "", *(text for part in parts if part for text in (*part, ""))])


def _us(found: dict, system: str) -> str:
    return f"{found[system]:.0f}" if found.get(system) else "–"


def _ratio(found: dict, above: str, below: str) -> str:
    return f"{found[above] / found[below]:.2f}×" if found.get(above) and found.get(below) else "–"
