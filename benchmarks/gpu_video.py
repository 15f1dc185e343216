"""Video transformers on a GPU: sliding tiles beside FlexAttention, a layer of Wan, and a million tokens.

measure:  python benchmarks/gpu_video.py --out ROWS.json [--only tiles Wan …] [--systems stof,flex]
peers:    the same with --systems flex-fa4,cudnn-flex in an environment that has their packages
          the same with --systems fastvideo-sta,fastvideo-blocks in one that has FastVideo's kernels
merge:    python benchmarks/gpu_video.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_video.py --dry-run        tiny, on the CPU

A process for each row compiles beside the others, and is measured alone.  Inputs are fresh random numbers, outputs are
allocated where NaN stood, and are compared with float32, on sampled heads and rows of the benchmark's own mask, before
they are timed.  Layers of Wan need diffusers; each system's output is compared with the model's in float32.
"""

import argparse
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.models.worker import Worker  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.newest import merge_newest  # noqa: E402
from benchmarks.peers.results import write_rows  # noqa: E402
from benchmarks.video.cases import ALL, BLOCK, CASES, DEFAULT, SYSTEMS, TINY, Case  # noqa: E402
from benchmarks.video.fastvideo import has_kernel  # noqa: E402
from benchmarks.video.report import is_right, line, page  # noqa: E402

BENCH = "video"
LOG = Path(tempfile.gettempdir(), "gpu_video.log")


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return merge(options.merge, options.results)
    need_gpu(options)
    return measure(options)


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this file, again after every row")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--systems", default=",".join(DEFAULT), help=f"of {', '.join(ALL)}")
    parser.add_argument("--prepare-s", default=170.0, type=float, help="seconds after which timing starts regardless")
    parser.add_argument("--deadline-s", default=240.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--log", type=Path, default=LOG, help="what the processes print; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU, in this process")
    parser.add_argument("--merge", nargs="+", type=Path, help="make a table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.systems.split(",") if name not in ALL]:
        parser.error(f"unknown system {unknown[0]!r}; there are: {', '.join(ALL)}")
    return options


def plan(options) -> list[tuple[Case, str]]:
    """The rows that are asked for; layers of Wan, which take longest to compile, begin first."""
    cases = [case for case in (TINY if options.dry_run else CASES) if any(text in case.label for text in options.only)]
    cases.sort(key=lambda case: case.kind != BLOCK)
    asked = options.systems.split(",")
    rows = [(case, system) for case in cases for system in SYSTEMS[case.kind] if system in asked]
    return [(case, system) for case, system in rows if has_kernel(case, system)]


def measure(options) -> int:
    """Measure every case by every system; 1 if some failed, were left out or are wrong."""
    start, facts, rows = time.monotonic(), provenance(options), []
    options.log.write_text("")
    for case, system, found in (here if options.dry_run else apart)(plan(options), start, options):
        rows.append({"bench": BENCH, **facts, "case": asdict(case), "system": system, **found})
        print(f"{time.monotonic() - start:5.0f} s {line(rows[-1])}", flush=True)
        if options.out:
            write_rows(options.out, rows)
    wrong = [row for row in rows if not is_right(row)]
    print(f"{len(rows)} rows, {len(wrong)} failed or wrong")
    return int(bool(wrong))


def arguments_of(case: Case, system: str, small: bool):
    """What makes a row's system ready, and its arguments."""
    device = "cpu" if small else "cuda"
    if case.kind == BLOCK:
        from benchmarks.video import wan

        return wan.get_ready, (case, system, device, small)
    from benchmarks.video import attention

    return attention.get_ready, (case, system, device)


def here(jobs, start: float, options):
    """(case, system, fields of the row) one after another in this process."""
    import torch

    for case, system in jobs:
        try:
            with torch.no_grad():
                get_ready, arguments = arguments_of(case, system, options.dry_run)
                facts, measured = get_ready(*arguments)
                found = facts | measured()
        except Exception as error:  # one system's failure is a row, and must not end the others
            found = {"failed": f"{type(error).__name__}: {error}"[:500]}
        yield case, system, found


def apart(jobs, start: float, options):
    """The same of a process each; all get ready at once, and those that are ready first are measured first."""
    workers = [Worker(c, s, *arguments_of(c, s, options.dry_run), str(options.log)) for c, s in jobs]
    try:
        # Nothing is timed beside a process that still compiles, unless it takes too long.
        late = [not worker.is_ready(start + options.prepare_s) for worker in workers]
        for _, worker in sorted(zip(late, workers, strict=True), key=lambda each: each[0]):
            yield worker.case, worker.system, worker.measure(start + options.deadline_s)
    finally:
        for worker in workers:
            worker.close()


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/video.json and .md of the files' rows; of a case and a system the newest row counts."""
    return merge_newest(paths, folder, BENCH, page, ("system",))


if __name__ == "__main__":
    sys.exit(main())
