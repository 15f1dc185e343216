"""Sparse attention on a GPU beside every peer, over a grid and long contexts, or decoding; and the rows' tables.

measure:  python benchmarks/gpu_attention.py [--set long | --decode] [--part K/N] [--peers A,B] [--fa4-path DIR …]
          prints a line a case and writes results/<gpu>/attention.json and .md (or decode.*): new rows replace old ones
apart:    the same with --out ROWS.json writes only that file
merge:    python benchmarks/gpu_attention.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_attention.py --dry-run        every case, tiny, on the CPU; prints the plan and its cost

All systems are compiled in parallel processes first and then timed one at a time.  Medians over CUDA-graph replays by
device events; inputs rotate past the L2 cache; wall-clock medians beside them.  benchmarks/README.md says more.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.cases import SETS, Case, attention_cases, decode_cases, tiny  # noqa: E402
from benchmarks.peers.pool import Group, Pool, Work  # noqa: E402
from benchmarks.peers.report import failures, page, requirements_table  # noqa: E402
from benchmarks.peers.results import Results, best, read_rows, useful_tflops, write_rows  # noqa: E402
from benchmarks.peers.systems import ALL, CUDNN, FA4_GROUP, FASTVIDEO, GROUPS, systems_for  # noqa: E402

# Seconds of one processor to make a system ready for a case, and of the GPU to time it: guesses for the plan only.
PREPARE_S = {
    "stof": 4, "flex-tensor": 5, "flex-analytic": 5, "flex-fa4-tensor": 12, "flex-fa4-analytic": 12, "fa4": 8,
    "cudnn-flex": 12, "cudnn-bsa": 12, "fastvideo": 2,
}  # fmt: skip
TIMING_S = 0.15
GPU_MACHINE_CPUS = 16
LOG = Path(tempfile.gettempdir(), "gpu_attention.log")
ROWS = Path(tempfile.gettempdir(), "gpu_attention.json")
FLUSH_EVERY = 10  # cases


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.worker is not None:
        from benchmarks.peers.worker import serve

        serve(Connection(options.worker), options.device)
        return 0
    if options.merge:
        return merge(options.merge, options.results)
    plan = make_plan(options)
    print_plan(plan, options)
    if options.dry_run or options.out:
        return measure(shrunk(plan) if options.dry_run else plan, options)
    options.out = ROWS
    status = measure(plan, options)
    merge([*published(ROWS, options.results), ROWS], options.results)
    return status


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this file only, again and again while measuring")
    parser.add_argument(
        "--set", choices=SETS, default="all", help="the grid, long contexts and other head sizes, or all"
    )
    parser.add_argument("--decode", action="store_true", help="one query against a KV cache instead of the grid")
    parser.add_argument("--part", default="1/1", type=_part, help="K/N: every N-th shape's cases, from the K-th on")
    parser.add_argument("--peers", default=",".join(ALL), type=_names, help="only these systems, split at ','")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--fa4-path", type=Path, help="folder of FlashAttention-4; without, its systems are left out")
    parser.add_argument("--cudnn-path", type=Path, help="folder of cuDNN's front end; its systems need --fa4-path too")
    parser.add_argument("--fastvideo-path", type=Path, help="folder of FastVideo's kernels; without, left out")
    parser.add_argument("--workers", type=int, help="processes that compile; default: all CPUs, or a third")
    parser.add_argument("--fa4-workers", type=int, help="the same for FlashAttention-4; default: half of the CPUs")
    parser.add_argument("--prepare-s", default=330.0, type=float, help="seconds after which timing starts regardless")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--log", type=Path, default=LOG, help="what the workers print; default: %(default)s")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make tables of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.cudnn_path and not options.fa4_path:
        parser.error(
            f"--cudnn-path {options.cudnn_path} needs --fa4-path: FlashAttention-4's folder has the CUTLASS DSL"
        )
    if options.dry_run:
        options.device = "cpu"
    return options


def make_plan(options) -> list[Work]:
    """The cases of this part, each with the systems asked for."""
    cases = decode_cases() if options.decode else attention_cases(options.set)
    shapes = list(dict.fromkeys(case.shape for case in cases))
    part, parts = options.part
    mine = set(shapes[part - 1 :: parts])
    cases = [case for case in cases if case.shape in mine and any(text in case.label for text in options.only)]
    out = left_out(options)
    plan = [(case, tuple(s for s in systems_for(case) if s in options.peers and s not in out)) for case in cases]
    return [(case, systems) for case, systems in plan if systems]


def left_out(options) -> dict[str, str]:
    """Systems whose folders are not given, and the options that name them."""
    out = {} if options.fa4_path else dict.fromkeys(FA4_GROUP, "--fa4-path")
    if options.fa4_path and not options.cudnn_path:
        out |= dict.fromkeys(CUDNN, "--cudnn-path")
    return out if options.fastvideo_path else out | dict.fromkeys(FASTVIDEO, "--fastvideo-path")


def shrunk(plan: list[Work]) -> list[Work]:
    """The plan at sizes for a CPU; cases that become the same are one."""
    merged: dict[Case, dict[str, None]] = {}
    for case, systems in plan:
        merged.setdefault(tiny(case), {}).update(dict.fromkeys(systems))
    return [(case, tuple(systems)) for case, systems in merged.items()]


def print_plan(plan: list[Work], options) -> None:
    """What will run, and a guess at its cost on a machine with GPU_MACHINE_CPUS."""
    per_group, sizes = split(plan), group_sizes(options, GPU_MACHINE_CPUS)
    timing = TIMING_S * sum(len(systems) for _, systems in plan)
    compiling = max(
        sum(PREPARE_S.get(s, 0.2) for _, systems in work for s in systems) / sizes[name]
        for name, work in per_group.items()
    )
    if options.dry_run:
        for case, systems in plan:
            print(f"  {case.label}: {' '.join(systems)}")
    print(f"{len(plan)} cases, {sum(len(systems) for _, systems in plan)} measurements")
    out = left_out(options)
    for option in dict.fromkeys(out.values()):
        print(f"left out without {option}: {', '.join(name for name in out if out[name] == option)}")
    print(f"guess on an H200 machine: {compiling:.0f} s to compile, {timing:.0f} s to time", flush=True)


def group_sizes(options, cpus: int) -> dict[str, int]:
    """How many processes compile in each environment."""
    share = 3 if options.fa4_path else 1
    return {
        "main": options.workers or max(1, (cpus - 1) // share),
        "fa4": options.fa4_workers or max(1, cpus // 2),
        "fastvideo": 1,  # which compiles nothing
    }


def split(plan: list[Work]) -> dict[str, list[Work]]:
    """The plan by the environment that its systems need."""
    groups: dict[str, list[Work]] = {}
    for case, systems in plan:
        for name, members in GROUPS.items():
            some = tuple(s for s in systems if s in members)
            if some:
                groups.setdefault(name, []).append((case, some))
    return groups


def measure(plan: list[Work], options) -> int:
    """Compile in parallel, time in order, write rows as they come."""
    start, per_group, sizes = time.monotonic(), split(plan), group_sizes(options, os.cpu_count() or 2)
    facts = provenance(options)
    folders = {"main": None, "fa4": fa4_folders(options), "fastvideo": fastvideo_folders(options)}
    groups = {name: Group(sizes[name], folders[name]) for name in GROUPS}
    rows: list[dict] = []
    not_timed = 0
    with options.log.open("w") as log:
        pool = Pool({name: groups[name] for name in per_group}, options.device, log)
        try:
            pool.prepare(per_group, start + options.prepare_s)
            print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
            todo = {name: dict(work) for name, work in per_group.items()}
            # What ran out of time to compile comes last: it compiles when its turn comes, if it does.
            plan = sorted(plan, key=lambda work: not all(pool.has_prepared(name, work[0]) for name in split([work])))
            for number, (case, _) in enumerate(plan):
                if time.monotonic() - start > options.deadline_s:
                    not_timed += 1
                    continue
                found: list[dict] = []
                for name, work in todo.items():
                    if case in work:
                        pool.time(name, (case, work[case]), found.append)
                rows += [{"bench": case.bench, **facts, **row} for row in found]
                print_case(case, rows[len(rows) - len(found) :])
                if number % FLUSH_EVERY == 0 and options.out:
                    write_rows(options.out, rows)
            if options.device == "cuda" and time.monotonic() - start < options.deadline_s:
                add_kernels(pool, per_group, rows)
        finally:
            pool.close()
            if options.out:
                write_rows(options.out, rows)
    print(f"{len(rows)} rows, {sum('failed' in row for row in rows)} failed, {time.monotonic() - start:.0f} s")
    print("\n".join(failures(rows)))
    if not_timed:
        print(f"{not_timed} cases were not timed: out of time")
    if rows and not options.dry_run:
        print("\n".join(requirements_table(Results(rows))))
    return int(bool(not_timed))


def fa4_folders(options) -> list[str]:
    """What is importable first beside FlashAttention-4."""
    if not options.fa4_path:
        return []
    folders = [options.fa4_path, options.fa4_path / "nvidia_cutlass_dsl/dsl_packages", options.cudnn_path]
    return [str(folder) for folder in folders if folder]


def fastvideo_folders(options) -> list[str]:
    """The same beside FastVideo's kernels."""
    return [str(options.fastvideo_path)] if options.fastvideo_path else []


def add_kernels(pool: Pool, per_group: dict[str, list[Work]], rows: list[dict]) -> None:
    """Profile each system once for every head size, last of all, and note the kernels in that case's row."""
    for name, work in per_group.items():
        seen = set()
        for case, systems in work:
            new = tuple(s for s in systems if (s, case.head_dim) not in seen)
            seen |= {(s, case.head_dim) for s in new}
            if new:
                found = pool.kernels(name, (case, new))
                for row in rows:
                    if row["system"] in found and Case.from_row(row) == case:
                        row["kernels"] = found[row["system"]]


def provenance(options) -> dict:
    """What every row of this run has in common."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    gpu, _, driver = (_output(query).splitlines() or [""])[0].partition(", ")
    return {
        "gpu": gpu or platform.processor() or platform.machine(),
        "driver": driver or platform.release(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])
        or "unknown",
        "run": uuid.uuid4().hex[:12],
    }  # fmt: skip


def print_case(case: Case, rows: list[dict]) -> None:
    """One line: ours, its rate, and every other system measured."""
    results = Results(rows)
    ours, peers = results.us(case, "stof"), results.peers(case, bounds=False)
    line = f"{case.label:<42}{results.densities.get(case, float('nan')):>7.3f}"
    if ours is not None:
        line += f"{ours:>9.1f} µs{useful_tflops(case, results.densities[case], ours):>6.0f} TFLOP/s"
    if ours is not None and peers:
        name, us = best(peers)
        line += f"  {us / ours:.2f}× {name}:"
    line += "".join(f" {name} {us:.1f}" for name, us in peers.items())
    print(line, flush=True)


def published(rows: Path, folder: Path) -> list[Path]:
    """The committed files that rows of this file belong to, where there are any."""
    paths = {folder / folder_name(row["gpu"]) / f"{row['bench']}.json" for row in read_rows([rows])}
    return sorted(path for path in paths if path.exists())


def folder_name(gpu: str) -> str:
    return gpu.lower().replace(" ", "-")


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/<bench>.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(gpu)
        benches = sorted({row["bench"] for row in rows if row["gpu"] == gpu})
        here = [row for row in rows if row["gpu"] == gpu]
        others = [path for bench in ("attention", "decode") if (path := place / f"{bench}.json").exists()]
        kept = [row for row in read_rows(others) if row["bench"] not in benches]
        everything = Results(kept + here)
        for bench in benches:
            results = Results(row for row in here if row["bench"] == bench)
            write_rows(place / f"{bench}.json", [row for _, row in sorted(results.rows.items(), key=lambda x: x[0])])
            (place / f"{bench}.md").write_text(page(bench, results, everything))
            print(f"{place / bench}.md: {len(results.rows)} rows")
        print("\n".join(requirements_table(everything)))
    return 0


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdigit() and parts.isdigit() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"{text!r} must be K/N with 1 <= K <= N")
    return int(part), int(parts)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in ALL]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown system {unknown[0]!r}; there are: {', '.join(ALL)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
