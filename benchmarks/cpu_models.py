"""Whole models in float32 on this CPU: engines beside ONNX Runtime, torch.compile and eager PyTorch, on all cores.

measure:  python benchmarks/cpu_models.py --out ROWS.json [--model bert …] [--shape 1x128 …] [--systems A,B]
merge:    python benchmarks/cpu_models.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/cpu_models.py --dry-run        one narrow layer of each model, uncompiled PyTorch

The systems of a case get ready in processes of their own, and then take turns: one call each, round after round.  Cases
that the file already holds are kept: after --deadline-s (exit status 1) the same command goes on.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil  # noqa: E402

from benchmarks.cpu.cases import MODELS, model_cases  # noqa: E402
from benchmarks.cpu.process import REFERENCE, Process  # noqa: E402
from benchmarks.cpu.report import line, page, summary  # noqa: E402
from benchmarks.cpu.systems import ALL, DEFAULT  # noqa: E402
from benchmarks.cpu_attention import cpu_name  # noqa: E402
from benchmarks.gpu_attention import folder_name, provenance  # noqa: E402
from benchmarks.models.cases import ModelCase, tiny  # noqa: E402
from benchmarks.models.results import ModelResults  # noqa: E402
from benchmarks.peers.report import failures, losses  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402

FOLDER = Path(tempfile.gettempdir(), "stof_cpu_models")
ROUNDS = (5, 25)  # at least, at most
ROUND_S = 30.0  # seconds in which a case has its rounds, if those are enough
PAUSE_S = 0.15  # before each call: threads of the system before stop spinning


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return merge(options.merge, options.results)
    if options.dry_run:
        options.folder = Path(tempfile.mkdtemp())
        options.out = options.out or options.folder / "rows.json"
    return measure(options)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--model", nargs="+", default=MODELS, choices=MODELS, help="only these")
    parser.add_argument("--shape", nargs="+", help="only these, as 1x512")
    parser.add_argument("--systems", default=",".join(DEFAULT), type=lambda text: text.split(","), help="split at ','")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1, help="of every system")
    parser.add_argument("--deadline-s", default=470.0, type=float, help="seconds after which no case begins")
    parser.add_argument("--prepare-s", default=300.0, type=float, help="seconds that a system has to get ready")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="exported graphs, references and the log")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="one narrow layer of each model")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if not (options.out or options.merge or options.dry_run):
        parser.error("one of --out, --merge and --dry-run is needed")
    if unknown := sorted(set(options.systems) - set(ALL)):
        parser.error(f"unknown system {unknown[0]!r}; there are: {', '.join(ALL)}")
    return options


def make_plan(options, rows: list[dict]) -> list[ModelCase]:
    """The cases of which the rows lack a system, or have a failed one: all their systems are timed again, together."""
    cases = [case for case in model_cases() if case.model in options.model]
    cases = [case for case in cases if options.shape is None or case.shape in options.shape]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
    done = {at for at, row in ModelResults(rows).rows.items() if "failed" not in row}
    return [case for case in cases if not {(case, system) for system in options.systems} <= done]


def measure(options) -> int:
    """Measure the plan case after case, writing rows after each; 1 where cases are left."""
    start = time.monotonic()
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = read_rows([options.out]) if options.out.exists() else []
    facts, plan = {**provenance(options), "gpu": cpu_name()}, make_plan(options, rows)
    while plan and time.monotonic() - start < options.deadline_s:
        case = plan.pop(0)
        for system, fields in measure_case(case, options).items():
            row = {"case": case.to_json(None), "system": system}
            rows.append({"bench": "models", **facts, **row, **fields})
        write_rows(options.out, rows)
        print(f"{time.monotonic() - start:4.0f} s  {line(ModelResults(rows), case)}", flush=True)
    results = ModelResults(rows)
    print("\n".join([*summary(results), *losses(results), *failures(list(results.rows.values()), ModelCase)]))
    if plan:
        print(f"{len(plan)} cases are left: the same command goes on")
    return int(bool(plan))


def measure_case(case: ModelCase, options) -> dict[str, dict]:
    """The fields of each system's row."""
    deadline = time.monotonic() + options.prepare_s
    make = lambda name: Process(
        case, name, options.threads, options.folder, options.dry_run, options.folder / "log.txt"
    )
    reference, processes = make(REFERENCE), [make(name) for name in options.systems]
    try:
        fields = {one.system: one.receive(deadline) for one in processes}
        is_checked = reference.receive(deadline) is not None
        samples = take_turns(processes, (2, 3) if options.dry_run else ROUNDS)
        for one in processes:
            if is_checked and (errors := one.ask("error", time.monotonic() + options.prepare_s)):
                fields[one.system] |= errors
        for one in processes:
            if one.failed is not None or not is_checked:
                fields[one.system] = {"failed": one.failed or f"nothing to compare with: {reference.failed}"}
            else:
                median = statistics.median(samples[one.system])
                fields[one.system] |= {"median_us": median, "wall_us": median, "samples_us": samples[one.system]}
        return fields
    finally:
        for one in (reference, *processes):
            one.close()


def take_turns(processes: list[Process], rounds: tuple[int, int]) -> dict[str, list[float]]:
    """Microseconds of calls of each process's system, one call each a round."""
    samples: dict[str, list[float]] = {one.system: [] for one in processes}
    start = time.monotonic()
    for number in range(rounds[1]):
        if number >= rounds[0] and time.monotonic() - start > ROUND_S:
            break
        for one in processes:
            time.sleep(PAUSE_S)
            if (us := one.ask("time", time.monotonic() + 120)) is not None:
                samples[one.system].append(round(us, 1))
    return samples


def merge(paths: list[Path], folder: Path) -> int:
    """Write <cpu>/models.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for cpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(cpu)
        results = ModelResults(row for row in rows if row["gpu"] == cpu)
        write_rows(place / "models.json", [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])])
        (place / "models.md").write_text(page(results))
        print(f"{place / 'models'}.md: {len(results.rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
