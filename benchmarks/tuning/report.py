"""Rows of the tuning benchmark, and the tables made of them."""

import math
import statistics

WITHIN = (1.05, 1.02, 1.01)  # of the best latency known
PAPER_SECONDS = {"1x128": 23, "8x512": 41, "16x2048": 100}  # on an A100, BERT-base


def row_of(variant: str, shape: str, data: dict, facts: dict) -> dict:
    """One result row of a search's data."""
    case = {
        "model": "bert-base",
        "mask": "bigbird",
        "batch": int(shape.split("x")[0]),
        "q_len": int(shape.split("x")[1]),
    }
    row = {"bench": "ablation" if variant not in ("stof", "long") else "tuning", **facts, "case": case}
    row |= {"system": "stof", "variant": variant}
    if "failed" not in data and data["best"]["us"] is None:
        data = {"failed": "it ended before all kernels had a time"}
    if "failed" in data:
        return row | {"failed": data["failed"]}
    history, known_us = data["history"], data["best"]["known_us"]
    best = known_us
    curve = [] if known_us is None else [[0, round(data["seconds"]["model"], 2), round(known_us, 2)]]
    for trial in history:
        if trial["model_us"] is not None and (best is None or trial["model_us"] < best):
            best = trial["model_us"]
            curve.append([trial["number"], round(trial["seconds"], 2), round(best, 2)])
    return row | {
        "seconds": round(history[-1]["seconds"], 2) if history else 0.0,
        "trials": len(history),
        "cached": sum(trial["is_cached"] for trial in history),
        "failed_trials": sum(trial["us"] is None for trial in history),
        "median_us": data["best"]["us"],
        "default_us": data["best"]["default_us"],
        "scheme": data["best"]["scheme"],
        "phases_s": {name: round(value, 2) for name, value in data["seconds"].items()},
        "tasks": data["tasks"],
        "steps": data["steps"],
        "curve": curve,
    }


def joined(before: dict, row: dict) -> dict:
    """The row of a search and of one that went on with its log: trials and seconds count on."""
    later = [[before["trials"] + n, round(before["seconds"] + s, 2), us] for n, s, us in row["curve"]]
    sums = {name: before[name] + row[name] for name in ("trials", "seconds", "cached", "failed_trials", "steps")}
    return {
        **row,
        **sums,
        "parts": before.get("parts", 1) + 1,
        "median_us": min(before["median_us"], row["median_us"]),
        "phases_s": {name: round(before["phases_s"][name] + s, 2) for name, s in row["phases_s"].items()},
        "curve": before["curve"] + [point for point in later if point[2] < before["curve"][-1][2]],
    }


def reached(row: dict, gain: float) -> tuple[int, float] | None:
    """The trial and the second at which a search was faster than the defaults, as it measured them, by a factor."""
    return next(((number, seconds) for number, seconds, us in row["curve"] if row["default_us"] / us >= gain), None)


def best_gain(rows: list[dict], case: dict) -> float:
    """The gain that searches of a case are compared with: the long search's, else the best of all.

    Gains over the defaults that the same search measured, because times of one kernel differ by 2 to 5 % between
    processes.
    """
    of_case = [row for row in rows if row["case"] == case and "failed" not in row]
    long = [row for row in of_case if row["variant"] == "long"]
    return max(row["default_us"] / row["median_us"] for row in long or of_case)


def summary(rows: list[dict]) -> str:
    """One line a kind of search: the trials and seconds that it took to the long search's gain, within 5, 2 and 1 %.

    Of several seeds the median; "never" where the median search did not arrive.
    """
    lines = [
        "| batch × length | search | seeds | trials | seconds | within 5 %: trials (s) | 2 % | 1 % | "
        "trials, of ours, to 2 % |",
        "|" + "---|" * 9,
    ]
    whole = [row for row in rows if "failed" not in row]
    for case, variant in dict.fromkeys((shape_of(row), row["variant"]) for row in whole):
        searches, ours = (
            [row for row in whole if shape_of(row) == case and row["variant"] == name] for name in (variant, "stof")
        )
        arrived = _arrived(searches, rows)
        trials = statistics.median(row["trials"] for row in searches)
        cells = [case, variant, len(searches), f"{trials:g}"]
        cells += [f"{statistics.median(row['seconds'] for row in searches):.1f}"]
        cells += ["never" if count == math.inf else f"{count:.0f} ({s:.1f})" for count, s in arrived]
        cells += [_ratio(arrived[1][0], trials, _arrived(ours, rows)[1][0])]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _ratio(theirs: float, trials: float, ours: float) -> str:
    """How many times our trials a search took, which did so many in all: "4.0×", or "> 4.0×" where it never arrived."""
    if ours in (0, math.inf) or not theirs:
        return ""
    return f"> {trials / ours:.1f}×" if theirs == math.inf else f"{theirs / ours:.1f}×"


def _arrived(searches: list[dict], rows: list[dict]) -> list[tuple[float, float]]:
    """Median trials and seconds to each of `WITHIN`; infinite where the median search did not arrive, or is none."""
    found = []
    for level in WITHIN:
        at = [reached(row, best_gain(rows, row["case"]) / level) or (math.inf, math.inf) for row in searches]
        found.append(tuple(map(statistics.median_high, zip(*at))) if at else (math.inf, math.inf))
    return found


def shape_of(row: dict) -> str:
    """Batch and length: "8x512"."""
    return f"{row['case']['batch']}x{row['case']['q_len']}"


def table(rows: list[dict]) -> str:
    """One line a search."""
    lines = [
        "| batch × length | search | seed | best µs | default µs | gain | trials | seconds | within 5 %: trials | "
        "seconds | paper s | model s | stage 1 s | stage 2 s | of these not waiting s | deciding s | commit |",
        "|" + "---|" * 17,
    ]
    for row in rows:
        shape, seed = shape_of(row), row.get("seed", 0)
        if "failed" in row:
            lines.append(f"| {shape} | {row['variant']} | {seed} | failed |" + " |" * 13)
            continue
        at = reached(row, best_gain(rows, row["case"]) / WITHIN[0])
        trials, seconds = ("—", "—") if at is None else (at[0], f"{at[1]:.1f}")
        phases = row["phases_s"]
        own = phases["stage_one"] + phases["stage_two"] - phases["waiting"]
        cells = [
            shape,
            row["variant"],
            seed,
            f"{row['median_us']:.1f}",
            f"{row['default_us']:.1f}",
            f"{row['default_us'] / row['median_us']:.2f}×",
            row["trials"],
            f"{row['seconds']:.1f}",
            trials,
            seconds,
            PAPER_SECONDS.get(shape, ""),
            *(f"{phases[name]:.1f}" for name in ("model", "stage_one", "stage_two")),
            f"{own:.1f}",
            f"{phases['deciding']:.2f}" if "deciding" in phases else "",
            row["commit"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def page(rows: list[dict]) -> str:
    """The table with what it means, and the tasks of the full search."""
    first = rows[0]
    lines = [
        f"# Tuning BERT-base on {first['gpu']}",
        "",
        f"Driver {first['driver']}, {first['date']}.  Each search starts from an empty "
        "log in a process of its own; seconds count from the call of `tune`, the import of the model included.  "
        "Latency is the sum of the kernels' measured times.  Within 5 %: of the long search's gain over the defaults "
        "that it measured itself, else of the best gain here; times differ by 2 to 5 % between processes.  The last "
        "columns are what the search does beside waiting for measurements, and what of it is the cost model, encoding "
        "candidates and the reward.",
        "",
        table(rows),
        "",
        "Trials, the defaults' included, and seconds until a search was within 5, 2 and 1 % of that gain; of several "
        "seeds the median.  Last, its trials to 2 %, or more than all where it did not arrive, over those of stof:",
        "",
        summary(rows),
    ]
    for row in rows:
        if row["variant"] == "stof" and "failed" not in row and not row.get("seed"):
            lines += ["", f"## Kernels at {row['case']['batch']} × {row['case']['q_len']}", ""]
            lines += ["| task | runs | trials | default µs | best µs |", "|---|---|---|---|---|"]
            for task in row["tasks"]:
                times = ["" if us is None else f"{us:.2f}" for us in (task["default_us"], task["best_us"])]
                lines.append(f"| {task['name']} | {task['count']} | {task['trials']} | {times[0]} | {times[1]} |")
    return "\n".join(lines) + "\n"
