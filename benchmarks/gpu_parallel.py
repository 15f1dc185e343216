"""Tensor parallelism: a LLaMA-like model of 7B weights on several GPUs, beside one GPU and PyTorch's DTensor.

measure:  NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 benchmarks/gpu_parallel.py --out ROWS.json [--only decode]
try out:  torchrun --nproc-per-node 2 benchmarks/gpu_parallel.py --dry-run        a tiny model on CPUs, with gloo

Prompts (batch, length) and the decoding of a token with a cache, float16.  Every rank runs the same calls the same
number of times; rank 0's times are written, by device events around calls that replay a CUDA graph.
"""

import argparse
import gc
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

import stof_tvm  # noqa: E402
from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.parallel.llama import TINY, Sizes, divided_by_pytorch, llama  # noqa: E402
from benchmarks.peers.results import write_rows  # noqa: E402

SYSTEMS = ("stof-1", "stof", "compile-sdpa-1", "compile-dtensor")
CASES = ("1x2048", "8x2048", "decode")


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where rank 0 writes its rows")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--systems", nargs="*", choices=SYSTEMS, default=SYSTEMS)
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--kv-heads", type=int, default=Sizes.kv_heads)
    parser.add_argument("--runs", type=int, default=20, help="timed calls; their median is written")
    parser.add_argument("--no-verify", action="store_true", help="do not compare engines with PyTorch at the build")
    parser.add_argument("--commit", help="of the code, where there is no git")
    parser.add_argument("--dry-run", action="store_true")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    device = "cpu" if options.dry_run else "cuda"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),))
    facts, rows = provenance(options), []
    for case in options.only:
        for system in options.systems:
            row = {"bench": "parallel", **facts, "case": described(case, mesh, options), "system": system}
            started = time.perf_counter()
            try:
                row |= measured(case, system, mesh, device, options)
            except Exception as error:  # a system that cannot, on all ranks alike
                row["failed"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            rows.append(row | {"build_s": round(time.perf_counter() - started, 1)})
            if dist.get_rank() == 0:
                print(f"{case:<8} {system:<16} {row.get('median_us', row.get('failed'))}", flush=True)
                if options.out is not None:
                    write_rows(options.out, rows)
    dist.destroy_process_group()
    return 0


def measured(case: str, system: str, mesh, device: str, options) -> dict:
    """The times of a system in a case, with its report's notes or how it was run."""
    sizes = TINY if options.dry_run else Sizes(layers=options.layers, kv_heads=options.kv_heads)
    dtype = torch.float32 if options.dry_run else torch.float16
    cache = 0 if case != "decode" else 16 if options.dry_run else 2048
    model, inputs = llama(sizes, device, dtype, cache), inputs_of(case, sizes, device, options)
    if system.startswith("stof"):
        where = None if system == "stof-1" else mesh
        target = "llvm" if device == "cpu" else None
        engine = stof_tvm.build(model, target, inputs, mesh=where, verify=not options.no_verify)
        engine.reuse_outputs = True
        del model
        report = engine.report()
        verified = report.verification
        about = {"notes": list(report.notes), "error": verified.error, "verification": verified.result}
        return {**about, **times(lambda: engine(*inputs), device, options.runs)}
    with torch.no_grad():
        expected = model(*inputs)
        if system == "compile-dtensor":
            model = divided_by_pytorch(model, mesh)
        call = torch.compile(model) if device == "cuda" else model
        error = (call(*inputs).float() - expected.float()).abs().max().item()
        run, how = captured(lambda: call(*inputs), device)
        return {"notes": [how], "error": error, **times(run, device, options.runs)}


def captured(call, device: str) -> tuple:
    """(the call as a replay of a CUDA graph where it can be captured, how it runs)."""
    if device == "cpu":
        return call, "as it is"
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except Exception as error:
        torch.cuda.synchronize()
        return call, f"without a CUDA graph: {type(error).__name__}"
    return graph.replay, "replays of a CUDA graph"


def times(call, device: str, runs: int) -> dict:
    """Microseconds of each of `runs` calls, all ranks starting together."""
    with torch.no_grad():
        for _ in range(3):
            call()
        samples = []
        for _ in range(runs):
            dist.barrier()
            if device == "cuda":
                torch.cuda.synchronize()
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                first.record()
                call()
                last.record()
                last.synchronize()
                samples.append(1e3 * first.elapsed_time(last))
            else:
                started = time.perf_counter()
                call()
                samples.append(1e6 * (time.perf_counter() - started))
    return {"median_us": statistics.median(samples), "samples_us": [round(x, 1) for x in samples]}


def inputs_of(case: str, sizes: Sizes, device: str, options) -> tuple:
    """The same inputs on every rank."""
    generator = torch.Generator().manual_seed(1)
    batch, length = shape_of(case, options)
    ids = torch.randint(0, sizes.vocabulary, (batch, length), generator=generator).to(device)
    return (ids, torch.tensor([8 if options.dry_run else 1024], device=device)) if case == "decode" else (ids,)


def shape_of(case: str, options) -> tuple[int, int]:
    if case == "decode":
        return 1, 1
    batch, length = map(int, case.split("x"))
    return batch, 32 if options.dry_run else length


def described(case: str, mesh, options) -> dict:
    batch, length = shape_of(case, options)
    sizes = TINY if options.dry_run else Sizes(layers=options.layers, kv_heads=options.kv_heads)
    model = "tiny" if options.dry_run else "llama-7b-like"
    return {"model": model, "mode": "decode" if case == "decode" else "prompt", "ranks": mesh.size(), "batch": batch,
            "q_len": length, **vars(sizes), "dtype": "float32" if options.dry_run else "float16"}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
