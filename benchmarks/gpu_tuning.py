"""How long tuning BERT-base takes from an empty log, and what each part of the search is good for.

measure:  python benchmarks/gpu_tuning.py --out ROWS.json [--shape 1x128 …] [--variants stof,random …] [--long 300]
merge:    python benchmarks/gpu_tuning.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_tuning.py --out ROWS.json --target llvm --shape 1x16 --trials 8

Each search runs in a process of its own, one after the other, from an empty log.  `--long` first runs one of that many
seconds, whose latency the others' are compared with: without it, the best of all searches of that shape counts.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.tuning.report import page, row_of, table  # noqa: E402
from benchmarks.tuning.variants import VARIANTS, run_variant  # noqa: E402


def main() -> int:
    options = parse_arguments()
    if options.one:
        shape = [int(n) for n in options.shape[0].split("x")]
        data = run_variant(options.one, *shape, options.target, options.trials, options.seconds, None, options.seed)
        options.out.write_text(json.dumps(data))
        return 0
    if options.merge:
        return merge(options.merge, options.results)
    return measure(options)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--shape", nargs="+", default=["1x128"], help="batch and length, as 8x512")
    parser.add_argument("--variants", default=",".join(VARIANTS), type=lambda text: text.split(","))
    parser.add_argument("--target", help="default: the GPU present")
    parser.add_argument("--trials", type=int, default=400, help="of a search (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a search (default: %(default)s)")
    parser.add_argument("--long", type=float, help="seconds of a search to compare with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # run one variant in this process
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := sorted(set(options.variants) - set(VARIANTS)):
        parser.error(f"unknown variant {unknown[0]!r}; there are: {', '.join(VARIANTS)}")
    return options


def measure(options) -> int:
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    facts = provenance(options)
    for shape in options.shape:
        plan = [(name, name, options.seconds, options.trials) for name in options.variants]
        if options.long:
            plan.insert(0, ("long", "stof", options.long, 100 * options.trials))
        for label, name, seconds, trials in plan:
            started = time.perf_counter()
            data = in_its_own_process(name, shape, seconds, trials, options)
            rows.append(row_of(label, shape, data, facts))
            options.out.write_text(json.dumps(rows) + "\n")
            if "page" in data:
                options.out.with_name(f"{label}_{shape}.html").write_text(data["page"])
            print(f"{label} {shape}: {time.perf_counter() - started:.0f} s with its process", flush=True)
            if "failed" in data:
                print(data["failed"])
    print(table(rows))
    return 0


def in_its_own_process(name: str, shape: str, seconds: float, trials: int, options) -> dict:
    """A search's data, or {"failed": why}."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "data.json")
        command = [sys.executable, __file__, "--one", name, "--shape", shape, "--seconds", str(seconds)]
        command += ["--trials", str(trials), "--seed", str(options.seed), "--out", str(out)]
        command += ["--target", options.target] if options.target else []
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if not out.exists():
            return {"failed": result.stderr[-2000:]}
        return json.loads(out.read_text())


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/tuning/tuning.json and .md of the files' rows; later rows of a case and variant replace earlier."""
    rows = {}
    for row in (row for path in paths for row in json.loads(path.read_text())):
        rows[row["gpu"], json.dumps(row["case"], sort_keys=True), row["variant"]] = row
    for gpu in sorted({row["gpu"] for row in rows.values()}):
        own = [row for row in rows.values() if row["gpu"] == gpu]
        place = folder / gpu.lower().replace(" ", "-") / "tuning"
        place.mkdir(parents=True, exist_ok=True)
        (place / "tuning.json").write_text(json.dumps(own, indent=1) + "\n")
        (place / "tuning.md").write_text(page(own))
        print(f"{place / 'tuning.md'}: {len(own)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
