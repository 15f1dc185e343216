"""What scripts share whose processes measure several rows each: options, the run of a plan, and the merge.

A job is some cases that one process measures for one system.  Rows that the file already holds are kept, failed ones
are measured again, and what a deadline cut off is in the next plan.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.gpu_attention import folder_name, provenance
from benchmarks.models.batches import measure_plan
from benchmarks.models.results import ModelResults
from benchmarks.models.worker import NOT_MEASURED, Worker
from benchmarks.peers.report import failures, losses
from benchmarks.peers.results import read_rows, write_rows

Job = tuple[tuple, str]  # cases of one process, and the system


def add_options(parser: argparse.ArgumentParser, bench: str, systems: Iterable[str], workers: int) -> None:
    """The options that these scripts share."""
    workers = min(workers, max(1, (os.cpu_count() or 2) - 1))
    log = Path(tempfile.gettempdir(), f"gpu_{bench}.log")
    split = lambda text: text.split(",")
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--systems", default=",".join(systems), type=split, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=workers, help="processes at a time; default: %(default)s")
    parser.add_argument("--prepare-s", default=300.0, type=float, help="seconds until what is ready is timed")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--log", type=Path, default=log, help="what the processes print; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="tiny cases on the CPU, uncompiled peers")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parents[1] / "results")


def parsed(parser: argparse.ArgumentParser, arguments, systems: Iterable[str]) -> argparse.Namespace:
    """The options, checked; a dry run without a file has a temporary one."""
    options = parser.parse_args(arguments)
    if not (options.out or options.merge or options.dry_run):
        parser.error("one of --out, --merge and --dry-run is needed")
    if unknown := sorted(set(options.systems) - set(systems)):
        parser.error(f"unknown system {unknown[0]!r}; there are: {', '.join(systems)}")
    if options.dry_run:
        options.out = options.out or Path(tempfile.mkdtemp(), "rows.json")
    return options


def left_over(jobs: Iterable[Job], case_type: type, options) -> list[Job]:
    """The jobs without the cases that are not asked for, and those whose row is in the file and did not fail."""
    rows = read_rows([options.out]) if options.out.exists() else []
    done = {at for at, row in ModelResults(rows, case_type).rows.items() if "failed" not in row}
    asked = [
        (tuple(c for c in cases if (c, system) not in done and any(text in c.label for text in options.only)), system)
        for cases, system in jobs
        if system in options.systems
    ]
    return [(cases, system) for cases, system in asked if cases]


def measure(
    bench: str,
    case_type: type,
    jobs: list[Job],
    start_worker: Callable[..., Worker],
    line: Callable,
    summary: Callable[[ModelResults], str],
    options,
    fit: Callable[[list[Job]], int] = len,
) -> int:
    """Measure jobs, print and write rows as they come; 1 where some are left for another call.

    What a signal to end cuts off is left as well, and its processes end.

    Parameters
    ----------
    start_worker
        Takes the cases of a job and its system; each part that the process sends holds its `case`.
    line
        `line(results, case)` is the line for the terminal.
    summary
        What is printed at the end.
    fit
        How many of some jobs, from the first on, the machine has room for at a time.
    """
    facts, plan = provenance(options), left_over(jobs, case_type, options)
    rows = read_rows([options.out]) if options.out.exists() else []
    come = set()

    def add(case, system: str, fields: dict) -> None:
        rows.append({"bench": bench, **facts, "case": case.to_json(), "system": system, **fields})
        write_rows(options.out, rows)
        come.add((case, system))
        print(line(ModelResults(rows, case_type), case), flush=True)

    def add_part(worker: Worker, fields: dict) -> None:
        add(fields["case"], worker.system, {name: value for name, value in fields.items() if name != "case"})

    def end(worker: Worker, fields: dict) -> None:
        if "failed" in fields and fields["failed"] != NOT_MEASURED:
            for case in worker.case:
                if (case, worker.system) not in come:
                    add(case, worker.system, fields)

    with _ended_by_signals():
        measure_plan(plan, start_worker, end, lambda batch: None, options, add_part, fit)
    results = ModelResults(rows, case_type)
    print(f"{len(results.rows)} rows in {options.out}\n{summary(results)}")
    print("\n".join([*losses(results), *failures(list(results.rows.values()), case_type)]))
    left = [(case, system) for cases, system in plan for case in cases if (case, system) not in come]
    if left:
        print(f"{len(left)} measurements are left")
    return int(bool(left))


@contextlib.contextmanager
def _ended_by_signals():
    """Let SIGTERM, which `timeout` sends, raise SystemExit, so that processes are ended on the way out."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def merge(bench: str, case_type: type, page: Callable[[ModelResults], str], paths: list[Path], folder: Path) -> int:
    """Write <gpu>/<bench>.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(gpu)
        results = ModelResults((row for row in rows if row["gpu"] == gpu), case_type)
        kept = [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])]
        write_rows(place / f"{bench}.json", kept)
        (place / f"{bench}.md").write_text(page(results))
        print(f"{place / bench}.md: {len(results.rows)} rows")
    return 0
