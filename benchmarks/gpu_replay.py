"""How long a fresh process takes to the first result of BERT-base: built with the tuning logs, or loaded as saved.

measure:  python benchmarks/gpu_replay.py --out ROWS.json [--model bert --shape 1x128] [--repeats 3]
try out:  python benchmarks/gpu_replay.py --out ROWS.json --target llvm        one narrow layer on the CPU

Three ways, each in processes of its own:
cold    `build` with an empty cache of compiled kernels
warm    `build` with the cache that the cold one has left
load    `stof_tvm.load` of what the cold one has saved, with that cache

Seconds, from the start of the process: `import_s` (PyTorch and what the way needs of TVM and this project), `model_s`
(the PyTorch model, weights included, and the inputs), `ready_s` (build or load), `first_call_s` (until the result is
there, on a GPU with the capture of its graph).  `total_s` is all of it, `process_s` as the caller sees it.  The results
of all processes must agree.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models.cases import MODELS, ModelCase, tiny  # noqa: E402

WAYS = ("cold", "warm", "load")
STEPS = ("import_s", "model_s", "ready_s", "first_call_s", "total_s", "process_s")
WANTED = {"cold": 30.0, "load": 3.0}  # seconds at most, of `ready_s` and `first_call_s` together
TOLERANCE = 1e-2  # of the largest element: two processes may add in different orders


def main() -> int:
    options = parse_arguments()
    batch, length = map(int, options.shape.split("x"))
    case = ModelCase(options.model, batch, length)
    if options.target and options.target.startswith("llvm"):
        case = replace(tiny(case), dtype="float32")
    if options.way:
        options.out.write_text(json.dumps(timed(options.way, case, options.target, options.folder)))
        return 0
    return measure(case, options)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="write the rows to this file")
    parser.add_argument("--model", default="bert", choices=MODELS)
    parser.add_argument("--shape", default="1x128", help="batch and length (default: %(default)s)")
    parser.add_argument("--target", help="default: the GPU present")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each way but the cold one")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # go one way in this process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of the saved engine and its result
    return parser.parse_args()


def measure(case: ModelCase, options) -> int:
    from benchmarks.gpu_attention import provenance

    facts, rows = provenance(options), []
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            runs = [fresh_process(way, Path(folder), options) for _ in range(1 if way == "cold" else options.repeats)]
            rows.append(row_of(way, runs, case, facts))
            print(line_of(rows[-1]), flush=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


def fresh_process(way: str, folder: Path, options) -> dict:
    """Seconds of one process, or {"failed": why}."""
    out = folder / "seconds.json"
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder), "--out", str(out)]
    command += ["--model", options.model, "--shape", options.shape]
    command += ["--target", options.target] if options.target else []
    started = time.perf_counter()
    result = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "STOF_CACHE_DIR": str(folder / "cache")}
    )
    if result.returncode:
        return {"failed": result.stderr[-2000:]}
    return {**json.loads(out.read_text()), "process_s": time.perf_counter() - started}


def row_of(way: str, runs: list[dict], case: ModelCase, facts: dict) -> dict:
    """A result row: medians of the processes."""
    row = {"bench": "replay", **facts, "case": case.to_json(None), "system": "stof", "variant": way}
    if failed := [run["failed"] for run in runs if "failed" in run]:
        return row | {"failed": failed[0]}
    medians = {name: round(statistics.median(run[name] for run in runs), 3) for name in STEPS}
    return row | medians | {"runs": runs, "from_log": runs[0]["from_log"]}


def line_of(row: dict) -> str:
    if "failed" in row:
        return f"{row['variant']:<5} failed: {row['failed']}"
    seconds = row["ready_s"] + row["first_call_s"]
    wanted = WANTED.get(row["variant"])
    verdict = "" if wanted is None else f", at most {wanted:g} wanted: {'met' if seconds <= wanted else 'not met'}"
    steps = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {row[name]:.2f}" for name in STEPS)
    return f"{row['variant']:<5} {seconds:.2f} s{verdict} ({steps}; {row['from_log']} kernels from the log)"


def timed(way: str, case: ModelCase, target: str | None, folder: Path) -> dict:
    """Seconds of each step in this process."""
    marks = [time.perf_counter()]

    def mark():
        marks.append(time.perf_counter())

    import torch

    import stof_tvm

    make = stof_tvm.load if way == "load" else stof_tvm.build  # imports what it needs
    mark()
    from benchmarks.models.families import make_inputs, make_model
    from benchmarks.peers.patterns import shared_pattern

    on_cpu = target is not None and target.startswith("llvm")
    (x,) = make_inputs(case, 1, "cpu")
    device_x = x if on_cpu else x.to("cuda")
    model = None if way == "load" else make_model(case, small=on_cpu)
    mask = shared_pattern(case.mask, case.sequence, case.sequence, "cpu").stof_mask()
    mark()
    with torch.no_grad():
        engine = make(folder / "engine.stof") if way == "load" else make(model, target, (x,), mask, strict=True)
    mark()
    out = engine(device_x)
    first = (out if isinstance(out, torch.Tensor) else out[0]).cpu()
    mark()
    if way == "cold":
        engine.save(folder / "engine.stof")
        torch.save(first, folder / "result.pt")
    check(first, torch.load(folder / "result.pt"))
    steps = dict(zip(STEPS, (b - a for a, b in zip(marks, marks[1:]))))
    return {**steps, "total_s": marks[-1] - marks[0], "from_log": from_log(engine)}


def check(result, expected) -> None:
    """SystemExit unless two processes gave the same."""
    error, largest = float((result - expected).abs().max()), float(expected.abs().max())
    if not error <= TOLERANCE * largest:
        raise SystemExit(f"another result than the cold process's: off by {error:.2e} of {largest:.2e}")


def from_log(engine) -> int:
    """How many attentions and segments of an engine have a measured choice."""
    report = engine.report()
    return sum(row.measured_us is not None for row in (*report.rewritten, *report.segments))


if __name__ == "__main__":
    sys.exit(main())
