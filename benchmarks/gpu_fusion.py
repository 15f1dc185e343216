"""Fused kernels on a GPU beside cuBLAS and torch.compile: times, fractions of the floor, requirements met or missed.

measure:  python benchmarks/gpu_fusion.py --out ROWS.json [--only TEXT …] [--tuned K]
merge:    python benchmarks/gpu_fusion.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_fusion.py --dry-run        tiny shapes, PyTorch on the CPU; kernels are only compiled

Everything is compiled in parallel processes, a case's systems are then timed next to each other.  Outputs are checked
against float32 before.  Medians over CUDA-graph replays by device events; inputs rotate past the L2 cache.
"""

import argparse
import multiprocessing
import os
import random
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.fusion.cases import FusionCase, fusion_cases, tiny  # noqa: E402
from benchmarks.fusion.report import failures, page, requirements_table  # noqa: E402
from benchmarks.fusion.results import OURS, FusionResults, floor_us  # noqa: E402
from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402

DRY_ARCH = "sm_80"  # where there is no GPU


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.merge:
        return merge(options.merge, options.results)
    cases = [case for case in fusion_cases() if any(text in case.label for text in options.only)]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
    return measure_all(cases, options)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this file, again and again while measuring")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--systems", type=lambda text: text.split(","), help="only these, split at ','")
    parser.add_argument("--tuned", default=1, type=int, help="also time the K configurations predicted to be fastest")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="compiling processes")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which nothing more is timed")
    parser.add_argument("--arch", help="target such as sm_80; default: the GPU present, whose code is embedded anyway")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def measure_all(cases: list[FusionCase], options) -> int:
    """Compile in parallel, time in order, write rows as they come; 1 where cases were left out."""
    from benchmarks.fusion import stof, torch_systems
    from benchmarks.fusion.measure import Broken, measure
    from tir_kernels.target import local_cuda_arch, parse_target

    start, device = time.monotonic(), "cpu" if options.dry_run else "cuda"
    facts, seed, rows = provenance(options), random.getrandbits(31), []
    target = parse_target(f"cuda -arch={options.arch or local_cuda_arch() or DRY_ARCH}")
    plan = {}
    for case in cases:
        systems = (*stof.systems_for(case, options.tuned), *torch_systems.systems_for(case))
        plan[case] = [s for s in systems if options.systems is None or s in options.systems]
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: a fork would share the CUDA context.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            built: dict[stof.Kernel, Future] = {}
            builds = {case: submit(pool, case, plan[case], target, options, folder, built) for case in cases}
            warm = [] if options.dry_run else [pool.submit(warm_up, case, plan[case]) for case in cases]
            wait_for([*built.values(), *warm], start + options.deadline_s / 2)
            print(f"compiled for {time.monotonic() - start:.0f} s", flush=True)
            done = 0
            for case, systems in plan.items():
                if time.monotonic() - start > options.deadline_s:
                    break
                found = []
                try:
                    for row in measure(case, systems, builds[case], device, seed):
                        found.append({"bench": "fusion", **facts, **row})
                except Broken as error:
                    print(f"{case.label}: {error}")
                    break
                finally:
                    rows += found
                    print_case(case, found)
                    if options.out:
                        write_rows(options.out, rows)
                done += 1
            pool.shutdown(cancel_futures=True)
    print(f"{len(rows)} rows, {sum('failed' in row for row in rows)} failed, {time.monotonic() - start:.0f} s")
    print("\n".join(failures(rows)))
    if done < len(plan):
        print(f"{len(plan) - done} cases were not timed")
    if not options.dry_run:
        print("\n".join(requirements_table(FusionResults(rows))))
    return int(done < len(plan))


def submit(pool, case: FusionCase, systems, target, options, folder: str, built: dict) -> dict[str, list]:
    """Our systems of a case: kernels, and a function that waits for their files; `built` are those under way."""
    from benchmarks.fusion import stof
    from tir_kernels.errors import UnsupportedError

    builds, arch = {}, str(target.attrs["arch"])
    for system in (system for system in systems if system.startswith(OURS)):
        try:
            some = stof.variants(system, case, target, options.tuned if system == "stof-tuned" else 1)
        except UnsupportedError as error:
            builds[system] = [((), _failing(error))]
            continue
        for kernel in (kernel for kernels in some for kernel in kernels if kernel not in built):
            path = str(Path(folder, f"{len(built)}.so"))
            built[kernel] = pool.submit(stof.build, kernel, arch, path)
        builds[system] = [(kernels, _waiting([built[kernel] for kernel in kernels])) for kernels in some]
    return builds


def _waiting(futures: list[Future]):
    return lambda: [future.result() for future in futures]


def _failing(error: Exception):
    def wait():
        raise error

    return wait


def warm_up(case: FusionCase, systems) -> None:
    """Compile PyTorch's systems once: Inductor's cache on the disk then serves the process that times them."""
    import torch

    from benchmarks.fusion.torch_systems import prepare

    torch.set_num_threads(1)
    inputs = [torch.zeros(shape, dtype=getattr(torch, case.dtype), device="cuda") for shape in case.input_shapes]
    for system in systems:
        if "compile" in system:
            prepare(system, case)(*inputs)
    torch.cuda.synchronize()
    del inputs
    torch.cuda.empty_cache()


def wait_for(futures: list[Future], deadline: float) -> None:
    """Until all are done, whatever came of them: the process that times them finds out, and reports it."""
    for future in futures:
        future.exception(timeout=max(0.0, deadline - time.monotonic()))


def print_case(case: FusionCase, rows: list[dict]) -> None:
    """One line: ours, its share of the floor, and every other system."""
    results = FusionResults(rows)
    ours = results.us(case, OURS)
    line = f"{case.label:<30}"
    if ours is not None:
        line += f"{ours:>9.2f} µs {floor_us(case) / ours:>4.0%} of floor"
        line += f" {case.flops / ours / 1e6:>4.0f} TFLOP/s" if case.k else ""
    for (_, system), row in results.rows.items():
        if system != OURS:
            us = results.us(case, system)
            line += f"  {system} {'failed' if 'failed' in row else 'wrong' if us is None else f'{us:.2f}'}"
    print(line, flush=True)


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/fusion.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / gpu.lower().replace(" ", "-")
        results = FusionResults(row for row in rows if row["gpu"] == gpu)
        write_rows(place / "fusion.json", [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])])
        (place / "fusion.md").write_text(page(results))
        print(f"{place / 'fusion'}.md: {len(results.rows)} rows")
        print("\n".join(requirements_table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
