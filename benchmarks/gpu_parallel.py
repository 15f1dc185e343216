"""Tensor parallelism: a LLaMA-like and a BERT-like model on several GPUs, beside one GPU and PyTorch's DTensor.

measure:  NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/gpu_parallel.py --out ROWS.json [--only decode]
merge:    python benchmarks/gpu_parallel.py --merge ROWS.json … [--results benchmarks/results]
try out:  torchrun --nproc-per-node 2 benchmarks/gpu_parallel.py --dry-run        tiny models on CPUs, with gloo

Prompts (batch × length), the decoding of a token with a cache, and an encoder with a window, in float16 with random
weights.  The systems of some cases get ready side by side, each in processes of its own, and are timed one after
another.  Results are compared with float32 first.
"""

import argparse
import os
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch.distributed as dist  # noqa: E402

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.parallel.cases import CASES, LLAMA, Case  # noqa: E402
from benchmarks.parallel.measure import SYSTEMS  # noqa: E402
from benchmarks.parallel.results import BENCH, line, merge  # noqa: E402
from benchmarks.parallel.shared_worker import SharedWorker, said_by_rank_0  # noqa: E402
from benchmarks.peers.results import is_correct, write_rows  # noqa: E402

LOG = str(Path(tempfile.gettempdir(), "gpu_parallel.log"))


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return merge(options.merge, options.results)
    need_gpu(options)
    # Ranks of the script only talk; their processes have the GPUs.
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    try:
        return measure(options, "cpu" if options.dry_run else "cuda")
    finally:
        dist.destroy_process_group()


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--out", type=Path, help="where rank 0 writes its rows, again after every row")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="cases (default: all)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS[:3], help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, help="of the LLaMA-like model, instead of its 32")
    parser.add_argument("--kv-heads", type=int, help="of the LLaMA-like model, instead of its 32")
    parser.add_argument("--together", type=int, default=len(SYSTEMS[:3]), help="systems that get ready side by side")
    parser.add_argument("--threads", type=int, help="of a process (default: the cores, shared out)")
    parser.add_argument("--prepare-s", type=float, default=420.0, help="until what is ready is timed")
    parser.add_argument("--deadline-s", type=float, default=560.0, help="until nothing more is")
    parser.add_argument("--no-verify", action="store_true", help="engines are not compared with PyTorch at the build")
    parser.add_argument("--worker-log", default=LOG, help="where processes print (default: %(default)s)")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make a table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def cases(options) -> list[Case]:
    """The cases that are asked for, with the sizes that are."""
    sizes = {"layers": options.layers, "kv_heads": options.kv_heads}
    given = {name: value for name, value in sizes.items() if value is not None}
    found = [case for case in CASES if case.name in options.only]
    found = [case.tiny for case in found] if options.dry_run else found
    return [replace(case, **given) if case.model == LLAMA else case for case in found]


def measure(options, device: str) -> int:
    """Time every system on every case; 1 if some failed, are wrong or were not ready in time."""
    start, facts, rows = time.monotonic(), provenance(options), []
    plan = [(case, system) for case in cases(options) for system in options.systems]
    threads = options.threads or max(1, (os.cpu_count() or 1) // (min(options.together, len(plan)) * _ranks()))
    # Libraries of the processes read these when they are imported.
    names = "OMP_NUM_THREADS", "TVM_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
    os.environ |= dict.fromkeys(names, str(threads))

    def add(worker: SharedWorker, fields: dict) -> None:
        about = {"case": asdict(worker.case), "system": worker.system, "ranks": _ranks()}
        rows.append({"bench": BENCH, **facts, **about, **fields})
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - start:5.0f} s {line(rows[-1])}", flush=True)
            if options.out:
                write_rows(options.out, rows)

    while plan:
        (late,) = said_by_rank_0(time.monotonic() - start > options.deadline_s)  # one rank's clock decides for all
        if late:
            break
        batch, plan = plan[: options.together], plan[options.together :]
        measure_batch(batch, device, threads, start, add, options)
    if dist.get_rank() == 0:
        left = ", ".join(f"{case.name} {system}" for case, system in plan)
        wrong = sum(not is_correct(row) for row in rows)
        print(f"{len(rows)} rows, {wrong} failed or wrong" + (f", left out: {left}" if left else ""))
    return int(bool(plan) or not all(map(is_correct, rows)))


def measure_batch(batch: list, device: str, threads: int, start: float, add, options) -> None:
    """Get systems ready side by side, and time them one after another; `add` takes each and its fields of the row."""
    arguments = device, threads, not options.no_verify, options.worker_log
    workers = [SharedWorker(case, system, *arguments) for case, system in batch]
    try:
        deadline = start + options.deadline_s
        prepared = min(deadline, time.monotonic() + options.prepare_s)
        late = [worker for worker in workers if not worker.is_ready(prepared)]
        # What is late goes on compiling while others are timed, so its processes come last.
        for worker in sorted(workers, key=lambda worker: worker in late):
            add(worker, worker.measure(deadline))
    finally:
        for worker in workers:
            worker.close()


def _ranks() -> int:
    return dist.get_world_size()


if __name__ == "__main__":
    sys.exit(main())
