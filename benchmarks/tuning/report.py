"""Rows of the tuning benchmark, and the tables made of them."""

WITHIN = 1.05  # of the best latency known
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
    if "failed" in data:
        return row | {"failed": data["failed"]}
    history = data["history"]
    curve, best = [], None
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
        "engines": {name: value for name, value in data.get("engines", {}).items() if name != "kernels"},
        "tasks": data["tasks"],
        "steps": data["steps"],
        "curve": curve,
    }


def reached(row: dict, latency: float) -> tuple[int, float] | None:
    """The trial and the second at which a search came to a latency."""
    return next(((number, seconds) for number, seconds, us in row["curve"] if us <= latency), None)


def best_us(rows: list[dict], case: dict) -> float:
    """The latency that searches of a case are compared with: the long search's, else the best of all."""
    of_case = [row for row in rows if row["case"] == case and "failed" not in row]
    long = [row for row in of_case if row["variant"] == "long"]
    return min(row["median_us"] for row in long or of_case)


def table(rows: list[dict]) -> str:
    """One line a search."""
    lines = [
        "| batch × length | search | best µs | default µs | gain | trials | seconds | within 5 %: trials | seconds | "
        "paper s | model s | stage 1 s | stage 2 s | of these not waiting s | deciding s | commit |",
        "|" + "---|" * 16,
    ]
    for row in rows:
        shape = f"{row['case']['batch']}x{row['case']['q_len']}"
        if "failed" in row:
            lines.append(f"| {shape} | {row['variant']} | failed |" + " |" * 13)
            continue
        at = reached(row, WITHIN * best_us(rows, row["case"]))
        trials, seconds = ("—", "—") if at is None else (at[0], f"{at[1]:.1f}")
        phases = row["phases_s"]
        own = phases["stage_one"] + phases["stage_two"] - phases["waiting"]
        cells = [
            shape,
            row["variant"],
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
        "Latency is the sum of the kernels' measured times.  Within 5 %: of the long search's latency, else the best "
        "here.  The last columns are what the search does beside waiting for measurements, and what of it is the "
        "cost model, encoding candidates and the reward.",
        "",
        table(rows),
    ]
    for row in rows:
        if row["variant"] == "stof" and "failed" not in row:
            lines += ["", f"## Kernels at {row['case']['batch']} × {row['case']['q_len']}", ""]
            lines += ["| task | runs | trials | default µs | best µs |", "|---|---|---|---|---|"]
            for task in row["tasks"]:
                times = ["" if us is None else f"{us:.2f}" for us in (task["default_us"], task["best_us"])]
                lines.append(f"| {task['name']} | {task['count']} | {task['trials']} | {times[0]} | {times[1]} |")
    return "\n".join(lines) + "\n"
