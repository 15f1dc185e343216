"""Models that nobody here tuned, on a GPU: engines by their defaults beside torch.compile with CUDA graphs.

measure:  python benchmarks/gpu_zoo.py --out ROWS.json [--model Qwen3-0.6B …] [--shape 1x512 …] [--systems A,B]
merge:    python benchmarks/gpu_zoo.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_zoo.py --dry-run        two narrow layers of each model on the CPU, uncompiled peers

Every system runs in a process of its own, which compiles with others and is timed alone.  Rows that the file already
holds are kept, and only failed ones measured again: a large plan can be cut by --model and --shape or by --deadline-s.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import folder_name, provenance  # noqa: E402
from benchmarks.models.batches import measure_plan  # noqa: E402
from benchmarks.models.results import ModelResults  # noqa: E402
from benchmarks.models.worker import Worker  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.report import failures, losses  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402
from benchmarks.zoo.cases import ZooCase, tiny, zoo_cases  # noqa: E402
from benchmarks.zoo.models import MODELS  # noqa: E402
from benchmarks.zoo.report import line, page, summary  # noqa: E402
from benchmarks.zoo.systems import ALL, DEFAULT_SYSTEMS, TUNED  # noqa: E402

LOG = Path(tempfile.gettempdir(), "gpu_zoo.log")
WORKERS = 9  # three cases' systems: models of two billion weights must fit a GPU's memory together


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.merge:
        return merge(options.merge, options.results)
    if options.dry_run:
        options.out = options.out or Path(tempfile.mkdtemp(), "rows.json")
    return measure(options)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    workers = min(WORKERS, max(1, (os.cpu_count() or 2) - 1))
    shapes = sorted({case.shape for case in zoo_cases()})
    systems = ",".join(DEFAULT_SYSTEMS)
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS, metavar="MODEL", help="only these")
    parser.add_argument("--shape", nargs="+", default=shapes, choices=shapes, metavar="SHAPE", help="only these: 1x512")
    parser.add_argument("--systems", default=systems, type=lambda text: text.split(","), help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=workers, help="processes at a time; default: %(default)s")
    parser.add_argument("--prepare-s", default=200.0, type=float, help="seconds until what is ready is timed")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--logs", type=Path, help=f"folder of the tuning logs (tune_models.py) that {TUNED} uses")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--log", type=Path, default=LOG, help="what the processes print; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="two narrow layers of each model on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if not (options.out or options.merge or options.dry_run):
        parser.error("one of --out, --merge and --dry-run is needed")
    if TUNED in options.systems and not options.logs:
        parser.error(f"{TUNED} needs --logs")
    if unknown := sorted(set(options.systems) - set(ALL)):
        parser.error(f"unknown system {unknown[0]!r}; there are: {', '.join(ALL)}")
    return options


def make_plan(options) -> list[tuple[ZooCase, str]]:
    """What is to be measured and is not yet among the file's rows, a case's systems next to each other."""
    cases = [case for case in zoo_cases() if case.model in options.model and case.shape in options.shape]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
    rows = read_rows([options.out]) if options.out.exists() else []
    done = {at for at, row in ModelResults(rows, ZooCase).rows.items() if "failed" not in row}
    return [(case, system) for case in cases for system in options.systems if (case, system) not in done]


def measure(options) -> int:
    """Compile a batch of systems in parallel, time them in order, write rows as they come; 1 where some are left."""
    facts, plan = provenance(options), make_plan(options)
    rows = read_rows([options.out]) if options.out.exists() else []

    def add(worker: Worker, fields: dict) -> None:
        rows.append({"bench": "zoo", **facts, "case": worker.case.to_json(), "system": worker.system, **fields})
        write_rows(options.out, rows)

    def show(cases: list[ZooCase]) -> None:
        for case in cases:
            print(line(ModelResults(rows, ZooCase), case), flush=True)

    plan = measure_plan(plan, lambda case, system: start_worker(case, system, options), add, show, options)
    results = ModelResults(rows, ZooCase)
    print(f"{len(results.rows)} rows in {options.out}\n{summary(results)}")
    print("\n".join([*losses(results), *failures(list(results.rows.values()), ZooCase)]))
    if plan:
        print(f"{len(plan)} measurements are left")
    return int(bool(plan))


def start_worker(case: ZooCase, system: str, options) -> Worker:
    from benchmarks.zoo.measure import get_ready

    logs = str(options.logs) if options.logs else None
    arguments = case, system, "cpu" if options.dry_run else "cuda", options.dry_run, logs
    return Worker(case, system, get_ready, arguments, str(options.log))


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/zoo.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(gpu)
        results = ModelResults((row for row in rows if row["gpu"] == gpu), ZooCase)
        write_rows(place / "zoo.json", [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])])
        (place / "zoo.md").write_text(page(results))
        print(f"{place / 'zoo'}.md: {len(results.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
