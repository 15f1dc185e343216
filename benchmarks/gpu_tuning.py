"""How long tuning BERT-base takes from an empty log, and what each part of the search is good for.

measure:  python benchmarks/gpu_tuning.py --out ROWS.json [--shape 1x128 …] [--variants stof,random …] [--seeds 0 …]
          python benchmarks/gpu_tuning.py --out ROWS.json --variants "" --long 600 --long-log FOLDER
merge:    python benchmarks/gpu_tuning.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_tuning.py --out ROWS.json --target llvm --shape 1x16 --trials 8

Each search runs in a process of its own, one after the other, from an empty log and an empty cache of compiled kernels;
"again" and "no-cache" from the log that "stof" has written just before, which the second of them does not look at.
Other calls may run at the same time, on other GPUs (CUDA_VISIBLE_DEVICES) and into other files.

`--long` first runs a search of that many seconds, with whose latency the others' are compared: without it, the best of
all searches of that shape counts.  With `--long-log` it goes on where an earlier call with that folder ended, and its
row is that of all these calls together.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.tuning.report import joined, page, row_of, summary, table  # noqa: E402
from benchmarks.tuning.variants import FROM_LOG, VARIANTS, run_variant  # noqa: E402


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.one:
        shape = [int(n) for n in options.shape[0].split("x")]
        data = run_variant(
            options.one, *shape, options.target, options.trials, options.seconds, options.log, options.seeds[0]
        )
        options.out.write_text(json.dumps(data))
        return 0
    if options.merge:
        return merge(options.merge, options.results)
    return measure(options)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--shape", nargs="+", default=["1x128"], help="batch and length, as 8x512")
    parser.add_argument("--variants", default=",".join(VARIANTS), type=lambda text: text.split(",") if text else [])
    parser.add_argument("--target", help="default: the GPU present")
    parser.add_argument("--trials", type=int, default=400, help="of a search (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a search (default: %(default)s)")
    parser.add_argument("--long", type=float, help="seconds of a search to compare with")
    parser.add_argument("--long-log", type=Path, help="folder of that search, to go on with it in a later call")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of each search, one search a seed")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # run one variant in this process
    parser.add_argument("--log", help=argparse.SUPPRESS)  # the log of that variant
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := sorted(set(options.variants) - set(VARIANTS)):
        parser.error(f"unknown variant {unknown[0]!r}; there are: {', '.join(VARIANTS)}")
    if "stof" not in options.variants and (lacking := sorted(set(options.variants) & set(FROM_LOG))):
        parser.error(f"{lacking[0]!r} begins with the log of 'stof', which is not among the variants")
    if not (options.out or options.merge):
        parser.error("one of --out and --merge is needed")
    return options


class Planned(NamedTuple):
    """A search: its row's name, which of `VARIANTS` it is, its limits and seed, and the folder of its log."""

    label: str
    variant: str
    seconds: float
    trials: int
    seed: int
    log: Path


def measure(options) -> int:
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    facts = provenance(options)
    for shape, seed in itertools.product(options.shape, options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            for search in planned(options, shape, seed, Path(folder)):
                started = time.perf_counter()
                if search.label in FROM_LOG:
                    shutil.copytree(Path(folder, "stof"), search.log, dirs_exist_ok=True)
                data = in_its_own_process(search, shape, options)
                row = row_of(search.label, shape, data, facts | {"seed": seed})
                rows.append(gone_on(row, search.log) if search.label == "long" else row)
                options.out.write_text(json.dumps(rows) + "\n")
                if "page" in data and not seed:
                    options.out.with_name(f"{search.label}_{shape}.html").write_text(data["page"])
                seconds = time.perf_counter() - started
                print(f"{search.label} {shape}, seed {seed}: {seconds:.0f} s with its process", flush=True)
                if "failed" in data:
                    print(data["failed"])
    print(table(rows), summary(rows), sep="\n\n")
    return 0


def planned(options, shape: str, seed: int, folder: Path) -> list[Planned]:
    """The searches of a shape and seed; logs are below `folder` but for that of a long search, which may go on.

    The first seed has the long search.
    """
    limits = options.seconds, options.trials, seed
    searches = [Planned(name, name, *limits, folder / name) for name in options.variants]
    if options.long and seed == options.seeds[0]:
        log = (options.long_log or folder / "long") / shape
        searches.insert(0, Planned("long", "stof", options.long, 1000 * options.trials, seed, log))
    return sorted(searches, key=lambda search: search.label in FROM_LOG)


def gone_on(row: dict, log: Path) -> dict:
    """The row of a long search, with what earlier calls found; kept beside its log for later ones."""
    place = log.with_name(f"{log.name}.json")
    if "failed" not in row:
        if place.exists():
            row = joined(json.loads(place.read_text()), row)
        place.write_text(json.dumps(row))
    return row


def in_its_own_process(search: Planned, shape: str, options) -> dict:
    """A search's data, or {"failed": why}."""
    search.log.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "data.json")
        command = [sys.executable, __file__, "--one", search.variant, "--shape", shape, "--log", str(search.log)]
        command += ["--seconds", str(search.seconds), "--trials", str(search.trials), "--seeds", str(search.seed)]
        command += ["--out", str(out)] + (["--target", options.target] if options.target else [])
        cold = {**os.environ, "STOF_CACHE_DIR": str(Path(folder, "cache"))}
        result = subprocess.run(command, capture_output=True, text=True, check=False, env=cold)
        if not out.exists():
            return {"failed": result.stderr[-2000:]}
        return json.loads(out.read_text())


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/tuning/tuning.json and .md of the files' rows; later rows of a search replace earlier."""
    rows = {}
    for row in (row for path in paths for row in json.loads(path.read_text())):
        rows[row["gpu"], json.dumps(row["case"], sort_keys=True), row["variant"], row.get("seed", 0)] = row
    for gpu in sorted({row["gpu"] for row in rows.values()}):
        own = sorted((row for row in rows.values() if row["gpu"] == gpu), key=place_of)
        place = folder / gpu.lower().replace(" ", "-") / "tuning"
        place.mkdir(parents=True, exist_ok=True)
        (place / "tuning.json").write_text(json.dumps(own, indent=1) + "\n")
        (place / "tuning.md").write_text(page(own))
        print(f"{place / 'tuning.md'}: {len(own)} rows")
    return 0


def place_of(row: dict) -> tuple:
    """In the table: by size, then as in `VARIANTS`, the long search last, then by seed."""
    order = [*VARIANTS, "long"]
    return row["case"]["batch"] * row["case"]["q_len"], order.index(row["variant"]), row.get("seed", 0)


if __name__ == "__main__":
    sys.exit(main())
