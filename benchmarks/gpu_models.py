"""Whole models on a GPU: engines beside PyTorch eager and torch.compile with CUDA graphs, the same mask for all.

measure:  python benchmarks/gpu_models.py --out ROWS.json [--model bert …] [--shape 1x128 …] [--systems A,B]
merge:    python benchmarks/gpu_models.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_models.py --dry-run        one narrow layer of each model on the CPU, uncompiled peers

Every system runs in a process of its own, which compiles with others and is timed alone.  Rows that the file already
holds are kept, and only failed ones measured again: a large plan can be cut by --model and --shape or by --deadline-s.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import folder_name, provenance  # noqa: E402
from benchmarks.models.cases import MODELS, SHAPES, ModelCase, model_cases, tiny  # noqa: E402
from benchmarks.models.report import line, page  # noqa: E402
from benchmarks.models.results import ModelResults  # noqa: E402
from benchmarks.models.systems import ALL  # noqa: E402
from benchmarks.peers.report import failures, losses  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402

LOG = Path(tempfile.gettempdir(), "gpu_models.log")
COMPILE_THREADS = "2"  # of PyTorch's compiler, in each process


def main() -> int:
    options = parse_arguments()
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


class Worker:
    """One process for one system on one case.  A death of the process is a failed row."""

    def __init__(self, case: ModelCase, system: str, options):
        from benchmarks.models.measure import serve

        context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context
        self.case, self.system = case, system
        self.connection, theirs = context.Pipe()
        device = "cpu" if options.dry_run else "cuda"
        arguments = theirs, case, system, device, options.dry_run, str(options.log)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self.row, self.ready = None, False

    def is_ready(self, deadline: float) -> bool:
        """Whether the process waits for its turn, or has failed, before the deadline."""
        if not self.ready:
            self.ready = self._receive(deadline)
        return self.ready

    def measure(self, deadline: float) -> dict:
        """Let the process measure when it is ready; its fields of the row."""
        if not self.is_ready(deadline):
            self.row = {"failed": "not ready in time"}
        elif self.row is None:
            self.connection.send("go")
            if not self._receive(deadline):
                self.row = {"failed": "not measured in time"}
        self.close()
        return self.row

    def close(self) -> None:
        self.process.kill()
        self.process.join()

    def _receive(self, deadline: float) -> bool:
        """Take the process's next message, or note its death; False if neither came before the deadline."""
        if not self.connection.poll(max(0.0, deadline - time.monotonic())):
            return False
        try:
            kind, fields = self.connection.recv()
        except EOFError:
            self.process.join()
            kind, fields = "row", {"failed": f"the process died with exit code {self.process.exitcode}"}
        self.row = fields if kind == "row" else None
        return True


def measure(options) -> int:
    """Compile a batch of systems in parallel, time them in order, write rows as they come; 1 where some are left."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILE_THREADS)
    start, facts, plan = time.monotonic(), provenance(options), make_plan(options)
    deadline = start + options.deadline_s
    rows = read_rows([options.out]) if options.out.exists() else []
    densities = {case: density(case) for case, _ in plan}
    print(f"{len(plan)} measurements", flush=True)
    while plan and time.monotonic() < deadline:
        batch, plan = plan[: options.workers], plan[options.workers :]
        workers = [Worker(case, system, options) for case, system in batch]
        try:
            prepared = min(deadline, time.monotonic() + options.prepare_s)
            late = [worker for worker in workers if not worker.is_ready(prepared)]
            print(f"ready after {time.monotonic() - start:.0f} s, but for {len(late)}", flush=True)
            # What is late goes on compiling while others are timed, so its processes come last.
            for worker in sorted(workers, key=lambda worker: worker in late):
                row = {"case": worker.case.to_json(densities[worker.case]), "system": worker.system}
                rows.append({"bench": "models", **facts, **row, **worker.measure(deadline)})
                write_rows(options.out, rows)
        finally:
            for worker in workers:
                worker.close()
        for case in dict.fromkeys(case for case, _ in batch):
            print(line(ModelResults(rows), case), flush=True)
    results = ModelResults(rows)
    print(f"{len(results.rows)} rows, {time.monotonic() - start:.0f} s")
    print("\n".join([*losses(results), *failures(list(results.rows.values()), ModelCase)]))
    if plan:
        print(f"{len(plan)} measurements are left")
    return int(bool(plan))


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
