"""Every matrix product of the measured models on a GPU: the template's default configuration beside cuBLAS.

measure:  python benchmarks/gpu_products.py --out ROWS.json [--only TEXT …] [--all-configs] [--workers N]
merge:    python benchmarks/gpu_products.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_products.py --dry-run        tiny shapes, PyTorch on the CPU; kernels are only compiled

Kernels are compiled by processes.  A case's systems are checked against float64, then timed in turns: medians over
CUDA-graph replays by device events, between copies as in a model, after a warm-up to the clock that lasts; weights
rotate past the L2 cache.
`--all-configs` also times every configuration that is worth it (`candidates`), so that the regret of the choice is
seen; what is not compiled yet goes on compiling meanwhile.  Rows that the file already holds are kept, failures
measured again.
"""

import argparse
import contextlib
import multiprocessing
import os
import random
import sys
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.gpu_attention import folder_name, provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.report import failures, losses  # noqa: E402
from benchmarks.peers.results import read_rows, write_rows  # noqa: E402
from benchmarks.products.cases import ProductCase, product_cases, tiny  # noqa: E402
from benchmarks.products.cublas import systems_for  # noqa: E402
from benchmarks.products.report import line, page, requirements_table  # noqa: E402
from benchmarks.products.results import BEST, OURS, ProductResults  # noqa: E402

DRY_ARCH = "sm_90a"  # where there is no GPU
WORTH_MEASURING = 1.5  # of the default's predicted time; predictions are off by less
CASES_AHEAD = 24  # whose kernels are compiled while others are timed


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.merge:
        return merge(options.merge, options.results)
    if options.dry_run:
        options.out = options.out or Path(tempfile.mkdtemp(), "rows.json")
    return measure_all(make_plan(options), options)


def parse_arguments(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="add the rows to this file as they come")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--all-configs", action="store_true", help="also time every configuration that may be chosen")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="compiling processes")
    parser.add_argument("--deadline-s", default=560.0, type=float, help="seconds after which no further case starts")
    parser.add_argument("--arch", help="target such as sm_80; default: the GPU present")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make the table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args(arguments)
    if not (options.out or options.merge or options.dry_run):
        parser.error("one of --out, --merge and --dry-run is needed")
    return options


def make_plan(options) -> list[ProductCase]:
    """The cases that the file does not have yet, those with failures last."""
    cases = [case for case in product_cases() if any(text in case.label for text in options.only)]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
    results = ProductResults(read_rows([options.out]) if options.out.exists() else [])
    failed = {case for (case, _), row in results.rows.items() if "failed" in row}

    def systems(case):
        return (OURS, *systems_for(case), *([BEST] if options.all_configs else []))

    left = [c for c in cases if c in failed or any((c, system) not in results.rows for system in systems(c))]
    return sorted(left, key=lambda case: case in failed)


def measure_all(plan: list[ProductCase], options) -> int:
    """Compile in parallel, time in order, write rows as they come; 1 where cases were left out."""
    from benchmarks.products.measure import Broken, measure
    from tir_kernels.target import local_cuda_arch, parse_target

    start, facts, seed = time.monotonic(), {"bench": "products", **provenance(options)}, random.getrandbits(31)
    device = "cpu" if options.dry_run else "cuda"
    target = parse_target(f"cuda -arch={options.arch or local_cuda_arch() or DRY_ARCH}")
    rows, done = read_rows([options.out]) if options.out.exists() else [], 0
    print(f"{len(plan)} cases", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # Spawned: a fork would share the CUDA context.
        with ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn")) as pool:
            builds: dict[ProductCase, dict] = {}

            def submit_until(count: int) -> None:
                for case in plan[len(builds) : count]:
                    builds[case] = submit(pool, case, target, options.all_configs, folder)

            if not options.all_configs:
                submit_until(len(plan))
                wait_for(builds, start + options.deadline_s / 2)
                print(f"compiled for {time.monotonic() - start:.0f} s", flush=True)
            for number, case in enumerate(plan):
                if time.monotonic() - start > options.deadline_s:
                    break
                submit_until(number + CASES_AHEAD)
                found: list[dict] = []
                try:
                    for row in measure(case, builds[case], device, seed):
                        found.append({**facts, **row})
                except Broken as error:
                    found.append({**facts, "case": case.to_json(), "system": OURS, "failed": str(error)})
                    break
                finally:
                    rows += found
                    write_rows(options.out, rows)
                    print(line(ProductResults(found), case), flush=True)
                done += 1
            pool.shutdown(cancel_futures=True)
    results = ProductResults(rows)
    print(f"{len(results.rows)} rows in {options.out}, {time.monotonic() - start:.0f} s")
    print("\n".join([*losses(results), *failures(list(results.rows.values()), ProductCase)]))
    if not options.dry_run:
        print("\n".join(requirements_table(results)))
    if done < len(plan):
        print(f"{len(plan) - done} cases are left")
    return int(done < len(plan))


def submit(pool, case: ProductCase, target, all_configs: bool, folder: str) -> dict[str, list]:
    """(kernel, function that waits for its file) of `OURS`, and of `BEST` if all are wanted, the default first."""
    from benchmarks.fusion import stof

    kernels = candidates(case, target)
    arch = str(target.attrs["arch"])
    futures = [
        pool.submit(stof.build, kernel, arch, str(Path(folder, f"{uuid.uuid4().hex}.so")))
        for kernel in (kernels if all_configs else kernels[:1])
    ]
    builds = [(kernel, future.result) for kernel, future in zip(kernels, futures)]
    return {OURS: builds[:1]} | ({BEST: builds} if all_configs else {})


def candidates(case: ProductCase, target) -> list:
    """The configurations that are worth measuring, the default of the template that computes the case first.

    They are among those that defaults come from, and not predicted to be much slower than it.
    """
    from benchmarks.fusion import stof
    from tir_kernels.fusion.gemm.sizes.configs import MEASURED
    from tir_kernels.fusion.registry import templates_for

    problem = case.problem
    template = next(t for t in templates_for(target) if t.unsupported(problem, target) is None)
    default, *others = template.configs(problem, target)
    chosen = [default, *(config for config in others if config in MEASURED)]
    kernels = [stof.Kernel(template.NAME, problem, c, template.predict_us(problem, c, target)) for c in chosen]
    return [kernel for kernel in kernels if kernel.predicted_us <= WORTH_MEASURING * kernels[0].predicted_us]


def wait_for(builds: dict[ProductCase, dict], deadline: float) -> None:
    """Until all are compiled or the deadline: who times them finds out what failed."""
    for some in builds.values():
        for _, wait in some[OURS]:
            with contextlib.suppress(Exception):
                wait(max(0.0, deadline - time.monotonic()))


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/products.json and .md of the files' rows; of rows of the same case and system the newest wins."""
    rows = read_rows(paths)
    for gpu in sorted({row["gpu"] for row in rows}):
        place = folder / folder_name(gpu)
        results = ProductResults(row for row in rows if row["gpu"] == gpu)
        write_rows(place / "products.json", [row for _, row in sorted(results.rows.items(), key=lambda item: item[0])])
        (place / "products.md").write_text(page(results))
        print(f"{place / 'products'}.md: {len(results.rows)} rows")
        print("\n".join(requirements_table(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
