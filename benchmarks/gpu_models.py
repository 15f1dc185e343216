"""Whole models on a GPU: engines beside PyTorch eager and torch.compile with CUDA graphs, the same mask for all.

measure:  python benchmarks/gpu_models.py --out ROWS.json [--model bert …] [--shape 1x128 …] [--systems A,B]
merge:    python benchmarks/gpu_models.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_models.py --dry-run        one narrow layer of each model on the CPU, uncompiled peers

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
from benchmarks.models.cases import MODELS, SHAPES, ModelCase, model_cases, tiny  # noqa: E402
from benchmarks.models.report import line, page  # noqa: E402
from benchmarks.models.results import ModelResults  # noqa: E402
from benchmarks.models.systems import ALL  # noqa: E402
from benchmarks.models.worker import Worker  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.report import failures, losses  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402

LOG = Path(tempfile.gettempdir(), "gpu_models.log")


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
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--model", nargs="+", default=MODELS, choices=MODELS, help="only these")
    parser.add_argument("--shape", nargs="+", default=[f"{b}x{s}" for b, s in SHAPES], help="only these, as 8x512")
    parser.add_argument("--systems", default=",".join(ALL), type=lambda text: text.split(","), help="split at ','")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="processes at a time")
    parser.add_argument("--prepare-s", default=150.0, type=float, help="seconds until what is ready is timed")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--log", type=Path, default=LOG, help="what the processes print; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="one narrow layer of each model on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if not (options.out or options.merge or options.dry_run):
        parser.error("one of --out, --merge and --dry-run is needed")
    if unknown := sorted(set(options.systems) - set(ALL)):
        parser.error(f"unknown system {unknown[0]!r}; there are: {', '.join(ALL)}")
    return options


def make_plan(options) -> list[tuple[ModelCase, str]]:
    """What is to be measured and is not yet among the file's rows, a case's systems next to each other."""
    cases = [case for case in model_cases() if case.model in options.model and case.shape in options.shape]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
    rows = read_rows([options.out]) if options.out.exists() else []
    done = {at for at, row in ModelResults(rows).rows.items() if "failed" not in row}
    return [(case, system) for case in cases for system in options.systems if (case, system) not in done]


def measure(options) -> int:
    """Compile a batch of systems in parallel, time them in order, write rows as they come; 1 where some are left."""
    facts, plan = provenance(options), make_plan(options)
    rows = read_rows([options.out]) if options.out.exists() else []
    densities = {case: density(case) for case, _ in plan}

    def add(worker: Worker, fields: dict) -> None:
        row = {"case": worker.case.to_json(densities[worker.case]), "system": worker.system}
        rows.append({"bench": "models", **facts, **row, **fields})
        write_rows(options.out, rows)

    def show(cases: list[ModelCase]) -> None:
        for case in cases:
            print(line(ModelResults(rows), case), flush=True)

    plan = measure_plan(plan, lambda case, system: start_worker(case, system, options), add, show, options)
    results = ModelResults(rows)
    print(f"{len(results.rows)} rows")
    print("\n".join([*losses(results), *failures(list(results.rows.values()), ModelCase)]))
    if plan:
        print(f"{len(plan)} measurements are left")
    return int(bool(plan))


def start_worker(case: ModelCase, system: str, options) -> Worker:
    from benchmarks.models.measure import get_ready

    arguments = case, system, "cpu" if options.dry_run else "cuda", options.dry_run
    return Worker(case, system, get_ready, arguments, str(options.log))


def density(case: ModelCase) -> float:
    """Share of the elements that attention keeps."""
    from benchmarks.models.peers import whole_mask
    from benchmarks.peers.patterns import shared_pattern

    return float(whole_mask(case, shared_pattern(case.mask, case.sequence, case.sequence, "cpu")).double().mean())


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/models.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(gpu)
        results = ModelResults(row for row in rows if row["gpu"] == gpu)
        write_rows(place / "models.json", [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])])
        (place / "models.md").write_text(page(results))
        print(f"{place / 'models'}.md: {len(results.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
