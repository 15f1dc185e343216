"""How long masks of a long sequence take to compile to block-sparse storage, and how much memory they need meanwhile.

Each case is compiled once, cold, in a process of its own, so that its peak memory is its own.  Exits with 1 when a case
takes more than 20 s or its peak grows by more than 1 GB.

    python benchmarks/mask_compile.py [--length 131072] [--json]
"""

import argparse
import json
import multiprocessing
import resource
import sys
import time

MAX_SECONDS, MAX_MB = 20, 1000

CASES = [
    ("bigbird()", (64, 64)),
    ("bigbird()", (128, 64)),
    ("bigbird()", (128, 128)),
    ("bigbird()", (16, 16)),
    ("bigbird(block=128)", (64, 64)),
    ("causal() & sliding_window(4096)", (64, 64)),
    ("causal() & bigbird(window=64, global_tokens=64)", (64, 64)),
    ("longformer()", (64, 64)),
    ("causal()", (64, 64)),
    ("a_shape(64, 4096)", (64, 64)),
    ("vertical_slash(range(0, LENGTH, 4096), range(0, LENGTH // 2, 8192))", (64, 64)),
    ("document([LENGTH // 8] * 8) & causal()", (64, 64)),
    ("fixed(512, 64)", (64, 64)),
    ("strided(512)", (64, 64)),
    ("sliding_tile((LENGTH // 4096, 64, 64), (4, 8, 8), (12, 24, 24))", (64, 64)),
    ("sliding_tile((LENGTH // 4096, 64, 64), (4, 8, 8), (12, 24, 24), order='row-major')", (64, 64)),
    ("neighborhood((LENGTH // 4096, 64, 64), (7, 15, 15), tile=(4, 8, 8))", (64, 64)),
    ("radial((LENGTH // 4096, 64, 64), least=64)", (128, 64)),
    ("from_mask_mod(lambda b, h, q, k: (q - k).abs() <= 256)", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: (q >= k) & (q // 4096 == k // 4096))", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: (OWNER[q] == OWNER[k]) & (q >= k))", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: (q >= k) & ((q - k < 1024) | (k % 64 == 0)))", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: (q - k) % 64 == 0)", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: TABLE[q // 64, k // 64])", (64, 64)),
    ("from_mask_mod(lambda b, h, q, k: (q * 7919 + k * 104729) % 13 == 0)", (64, 64)),
]


def measure(spelling: str, length: int, block: tuple[int, int]) -> dict:
    """One row of the table; runs in a process of its own."""
    import psutil
    import torch

    from stof_tvm import masks

    names = {"LENGTH": length, "OWNER": torch.arange(length) ** 2 // (length * 1000)}
    cells = -(-length // 64)
    names["TABLE"] = torch.rand(cells, cells, generator=torch.Generator().manual_seed(0)) < 0.1
    mask = eval(spelling, vars(masks) | names)
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()
    compiled = mask.compile(length, block=block)
    seconds = time.perf_counter() - start
    # ru_maxrss is the peak since the process began, in KiB on Linux: an upper bound of the peak of compiling.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "mask": spelling,
        "length": length,
        "block": list(block),
        "seconds": round(seconds, 3),
        "peak_rss_growth_mb": round((peak - before) / 1e6, 1),
        "full_blocks": len(compiled.full_col_idx),
        "part_blocks": len(compiled.part_col_idx),
        "density": compiled.density,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=131072, help="q_len and kv_len (default 131072)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON instead of a table")
    arguments = parser.parse_args()

    line = "{:<70} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9} {:>8}"
    if not arguments.json:
        print(line.format("mask", "length", "block", "seconds", "peak MB", "full", "part", "density"))
    rows = []
    context = multiprocessing.get_context("spawn")
    for spelling, block in CASES:
        with context.Pool(1) as pool:
            row = pool.apply(measure, (spelling, arguments.length, block))
        rows.append(row)
        if not arguments.json:
            shape, density = "{}x{}".format(*row["block"]), f"{row['density']:.4f}"
            numbers = (row["seconds"], row["peak_rss_growth_mb"], row["full_blocks"], row["part_blocks"])
            print(line.format(row["mask"], row["length"], shape, *numbers, density), flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    over = [row for row in rows if row["seconds"] > MAX_SECONDS or row["peak_rss_growth_mb"] > MAX_MB]
    for row in over:
        print(f"over the limit of {MAX_SECONDS} s and {MAX_MB} MB: {row['mask']} {row['block']}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
