"""Times of the CUDA block-wise kernel, every configuration, beside PyTorch's own attention with the same mask.

usage: python benchmarks/gpu_attention.py [--grid quick|full] [--peers] [--configs TEXT] [--out FILE]
Medians over CUDA-graph replays in microseconds.  Useful TFLOP/s counts kept elements only; scheduled counts all
elements of listed blocks.  The floor is q, k, v and the output once through memory at 4.3 TB/s (an H200).
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402

from tir_kernels.attention import block_wise_cuda  # noqa: E402
from tir_kernels.attention.problem import AttentionProblem  # noqa: E402
from tir_kernels.block_sparse_mask import BlockSparseMask  # noqa: E402

BANDWIDTH = 4.3e12  # bytes a second, a large device-to-device copy on an H200
QUICK = [(1, 12, 1024, 64), (8, 12, 2048, 64), (8, 12, 4096, 64), (16, 12, 4096, 64), (1, 32, 8192, 128)]
FULL = [(b, 12, s, 64) for b in (1, 8, 16) for s in (128, 256, 512, 1024, 2048, 4096)]
FULL += [(1, 32, s, 128) for s in (4096, 8192, 16384)]
MASKS = ("causal", "window", "longformer", "bigbird")


def dense_mask(name: str, length: int) -> np.ndarray:
    """Boolean (length, length): |i - j| <= 32; Longformer adds 32 global tokens, BigBird 10 % of 64×64 blocks."""
    i, j = np.arange(length)[:, None], np.arange(length)[None, :]
    if name == "causal":
        return j <= i
    keep = abs(i - j) <= 32
    if name != "window":
        keep |= (i < 32) | (j < 32)
    if name == "bigbird":
        blocks = np.random.default_rng(0).random((-(-length // 64),) * 2) < 0.1
        keep |= np.repeat(np.repeat(blocks, 64, axis=0), 64, axis=1)[:length, :length]
    return keep


def build(arguments) -> None:
    """Compile one kernel for the GPU present to a shared library; in a worker process."""
    import tvm

    from tir_kernels import cuda_compile  # noqa: F401  registers TVM's compile callback
    from tir_kernels.target import parse_target

    problem, config, path = arguments
    target = parse_target("cuda")
    func = block_wise_cuda.instantiate(problem, config, target).with_attr("global_symbol", "main")
    with target:
        executable = tvm.compile(tvm.IRModule({"main": func}), target=target, tir_pipeline="tirx")
    executable.export_library(path)


def samples_us(call, launches=20, repeats=15) -> list[float]:
    """Times of one launch, from replays of a CUDA graph of `launches`."""
    import torch

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            call()
    times = []
    for _ in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return sorted(times[2:])


def sdpa_with(backend, q, k, v, causal):
    """Dense or causal attention by one of PyTorch's back-ends."""
    import torch.nn.functional as F
    from torch.nn.attention import sdpa_kernel

    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def measure_case(shape, name, libraries, peers) -> list[dict]:
    """Rows of one shape and mask: each configuration, then the peers."""
    import torch
    import torch.nn.functional as F
    import tvm
    from torch.nn.attention import SDPBackend

    batch, heads, length, dim = shape
    keep = dense_mask(name, length)
    q, k, v, out = (torch.randn(shape, device="cuda", dtype=torch.float16) for _ in range(4))
    case = {
        "mask": name, "density": float(keep.mean()), "batch": batch, "heads": heads, "kv_heads": heads,
        "q_len": length, "kv_len": length, "head_dim": dim, "dtype": "float16",
    }  # fmt: skip
    useful = 4 * dim * float(keep.sum()) * batch * heads
    rows, masks = [], {}
    expected = None
    if batch * heads * length**2 <= 2**31:
        bias = torch.zeros((length, length), device="cuda").masked_fill(~torch.from_numpy(keep).cuda(), float("-inf"))
        expected = torch.softmax(q.float() @ k.float().mT * dim**-0.5 + bias, -1) @ v.float()
    for problem, config, path in libraries:
        block = (config.block_m, config.block_n)
        mask = masks.setdefault(block, BlockSparseMask.from_dense(keep, block))
        operands = [torch.from_numpy(a).cuda() for a in block_wise_cuda.mask_operands(mask, problem)]
        kernel = tvm.runtime.load_module(path)["main"]
        out.fill_(float("nan"))
        times = samples_us(lambda: kernel(q, k, v, *operands, out))
        error = float((out.float() - expected).abs().max()) if expected is not None else None
        finite = bool(out.isfinite().all())
        scheduled = 4 * dim * len(mask.load_col_idx) * block[0] * block[1] * batch * heads
        rows.append(
            _row(case, "stof-block-wise", config.label, times, useful, error=error, finite=finite, scheduled=scheduled)
        )
    if peers:
        dense = torch.from_numpy(keep).cuda()
        calls = {"sdpa-mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense)}
        causal = name == "causal"
        for system, backend in (("fa2", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            calls[system + "-causal" * causal] = lambda backend=backend: sdpa_with(backend, q, k, v, causal)
        for system, call in calls.items():
            rows.append(_row(case, system, "", samples_us(call, 5, 5), useful))
    return rows


def _row(case, system, variant, times, useful, **rest):
    median = times[len(times) // 2]
    row = {"case": case, "system": system, "variant": variant, "median_us": median, "samples_us": times, **rest}
    row["useful_tflops"] = useful / median / 1e6
    if "scheduled" in rest:
        row["scheduled_tflops"] = row.pop("scheduled") / median / 1e6
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--grid", choices=("quick", "full"), default="quick")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument(
        "--configs", default="", help="only configurations whose label holds one of these, split at ','"
    )
    parser.add_argument("--out", help="JSON file for all rows with their samples")
    options = parser.parse_args()
    from tir_kernels.target import parse_target

    target = parse_target("cuda -arch=sm_90")
    folder, jobs = tempfile.mkdtemp(), {}
    for shape in QUICK if options.grid == "quick" else FULL:
        batch, heads, length, dim = shape
        problem = AttentionProblem(batch, heads, heads, length, length, dim, dim, "float16", dim**-0.5)
        chosen = [
            c
            for c in block_wise_cuda.configs(problem, target)
            if any(text in c.label for text in options.configs.split(","))
        ]
        jobs[shape] = [(problem, c, os.path.join(folder, f"{len(jobs)}-{i}.so")) for i, c in enumerate(chosen)]
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), multiprocessing.get_context("spawn")) as pool:
        list(pool.map(build, [job for some in jobs.values() for job in some]))
    rows = []
    for shape, libraries in jobs.items():
        for name in MASKS:
            measured = measure_case(shape, name, libraries, options.peers)
            rows += measured
            floor = 4 * shape[0] * shape[1] * shape[2] * shape[3] * 2 / BANDWIDTH * 1e6
            print(f"{shape} {name} density {measured[0]['case']['density']:.3f} floor {floor:.1f} µs")
            for row in sorted(measured, key=lambda r: r["median_us"]):
                error = "" if row.get("error") is None else f"error {row['error']:.1e}"
                wrong = "" if row.get("finite", True) else "NOT FINITE"
                scheduled = row.get("scheduled_tflops", 0)
                print(
                    f"  {row['median_us']:9.1f} µs {row['useful_tflops']:6.1f} useful"
                    f" {scheduled:6.1f} scheduled TFLOP/s  {row['system']} {row['variant']} {error} {wrong}",
                    flush=True,
                )
    if options.out:
        Path(options.out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
