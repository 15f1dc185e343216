"""Sparse attention on this CPU beside PyTorch's F.scaled_dot_product_attention with the same boolean mask.

The causal mask is also compared with `is_causal=True`, for which PyTorch has a kernel that skips.

usage: python benchmarks/cpu_attention.py [--shape B,H,S,D] [--dtype float32] [--repeats 5] [--json FILE]
Times are wall clock: medians of interleaved repeats, after one warm-up of each.  Useful GFLOP/s counts kept elements
only.  Errors are the largest against float64 on a sample of rows; a broken bound ends in exit code 1.
"""

import argparse
import dataclasses
import datetime
import json
import platform
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import tvm  # noqa: E402

from stof_tvm import masks  # noqa: E402
from tir_kernels.attention.compiled import compile_attention  # noqa: E402
from tir_kernels.attention.problem import AttentionProblem  # noqa: E402
from tir_kernels.attention.reference import attention_reference  # noqa: E402
from tir_kernels.attention.select import choose  # noqa: E402
from tir_kernels.compiling.cpu_threads import use_all_cores  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402

MASKS = {
    "bigbird": masks.bigbird(window=64, global_tokens=64, random_fill=0.1),
    "longformer": masks.longformer(window=64, global_tokens=64),
    "sliding_window": masks.sliding_window(64),
    "dilated_window": masks.dilated_window(32, 16),
    "strided": masks.strided(64),
    "causal": masks.causal(),
}
SAMPLE_ROWS = 32
FLOAT32_BOUND = 2e-5  # absolute, unit normal operands


def main() -> int:
    arguments = parse_arguments()
    threads = use_all_cores()
    torch.set_num_threads(threads)
    run = uuid.uuid4().hex
    print(f"{cpu_name()}, {threads} threads, {arguments.dtype}, (B, H, S, D) = {arguments.shape}")
    print(f"{'mask':<15}{'density':>8}{'torch ms':>10}{'ours ms':>9}{'speedup':>8}{'GFLOP/s':>9}{'error':>9}", end="")
    print(f"{'torch':>9}  kernel")
    rows, failed = [], False
    for name, mask in MASKS.items():
        case, ours, peers, variant = measure(name, mask, arguments)
        peer = peers["sdpa-mask"]
        ms, peer_ms = ours["median_us"] / 1e3, peer["median_us"] / 1e3
        batch, heads, length, head_dim = arguments.shape
        flops = 4 * head_dim * case["density"] * length * length * batch * heads
        bound = FLOAT32_BOUND if arguments.dtype == "float32" else 2 * peer["error"]
        failed |= not ours["error"] <= bound
        print(
            f"{name:<15}{case['density']:>8.4f}{peer_ms:>10.1f}{ms:>9.2f}{peer_ms / ms:>8.1f}{flops / ms / 1e6:>9.0f}"
            f"{ours['error']:>9.1e}{peer['error']:>9.1e}  {variant}{'' if ours['error'] <= bound else '  ERROR'}"
        )
        common = {
            "bench": "attention",
            "gpu": cpu_name(),
            "driver": platform.release(),
            "date": today(),
            "commit": commit(),
        }
        common |= {"run": run, "case": case}
        rows.append({**common, "system": "stof", "variant": variant, **ours, "half_error": peer["error"]})
        for system, row in peers.items():
            rows.append({**common, "system": system, "variant": f"torch {torch.__version__}", **row})
        if "sdpa-causal" in peers:
            causal_ms = peers["sdpa-causal"]["median_us"] / 1e3
            print(
                f"{'':<15}{'':>8}{causal_ms:>10.1f}{'':>9}{causal_ms / ms:>8.1f}  beside is_causal=True, without a mask"
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return int(failed)


def measure(name, mask, arguments):
    """(case, our row, the peers' rows by system, our kernel's name) for one mask; rows have times and the error."""
    batch, heads, length, head_dim = arguments.shape
    problem = AttentionProblem(batch, heads, heads, length, length, head_dim, head_dim, arguments.dtype, head_dim**-0.5)
    target = parse_target("llvm")
    choice = choose(problem, mask, target)
    kernel = compile_attention(choice.template.NAME, problem, choice.config, target)
    operands = [tvm.runtime.tensor(array) for array in choice.operands(target).arrays]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(problem.shape(x), generator=generator).to(getattr(torch, arguments.dtype)) for x in "qkv")
    out, keep = torch.empty_like(q), mask.dense(length)

    def ours():
        kernel(q, k, v, *operands, out)
        return out

    def peer():
        return F.scaled_dot_product_attention(q, k, v, keep)

    def causal_peer():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    functions = {"ours": ours, "peer": peer, **({"causal": causal_peer} if name == "causal" else {})}

    sample = np.sort(np.random.default_rng(0).choice(length, min(SAMPLE_ROWS, length), replace=False))
    part = dataclasses.replace(problem, q_len=len(sample))
    exact = attention_reference(part, q[:, :, sample].double(), k.double(), v.double(), keep[sample].numpy())
    results = {label: {"samples_us": []} for label in functions}
    for label, function in functions.items():
        results[label]["error"] = float(np.abs(function()[:, :, sample].double().numpy() - exact).max())
    for _ in range(arguments.repeats):
        for label, function in functions.items():
            start = time.perf_counter()
            function()
            results[label]["samples_us"].append((time.perf_counter() - start) * 1e6)
    for result in results.values():
        result["median_us"] = result["wall_us"] = statistics.median(result["samples_us"])
    case = {
        "mask": name, "density": float(keep.double().mean()), "batch": batch, "heads": heads, "kv_heads": heads,
        "q_len": length, "kv_len": length, "head_dim": head_dim, "dtype": arguments.dtype,
    }  # fmt: skip
    peers = {"sdpa-mask": results["peer"], **({"sdpa-causal": results["causal"]} if "causal" in results else {})}
    return case, results["ours"], peers, f"{choice.template.NAME} llvm {choice.config.label}"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1,12,4096,64", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--dtype", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--repeats", default=5, type=int)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    return parser.parse_args()


def cpu_name() -> str:
    """The model name of this CPU, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def today() -> str:
    return datetime.date.today().isoformat()


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
