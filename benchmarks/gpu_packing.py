"""What a new set of lengths costs an engine without padding, and that a call with one waits for nothing.

measure:  python benchmarks/gpu_packing.py --out FOLDER [--commit NAME]

Batches of sentences (lognormal, 96 tokens in the mean, up to 512) and of longer documents go through BERT-base and
GPT-2, in half precision; every batch has other lengths, whose tokens fit the same row.  Before anything is timed, one
batch's results are compared with those of each sequence alone.  `planning_us` is what the GPU takes to write vectors
and lists, by replays of a graph of these kernels; `host_us` is the host's part of a call with new lengths, which runs
while PyTorch reports any wait for the GPU as an error; `new_us` and `known_us` are whole calls with new lengths and
with the same.
"""

import argparse
import copy
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks.lengths.cases import BATCH, LengthCase, Sizes  # noqa: E402
from benchmarks.lengths.models import make_model  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402

LIMIT_US = 60.0
SETS, REPLAYS = 24, 50
CASES = {  # batch, mean and longest length
    "32 sentences": ("BERT-base", 32, 96, 512),
    "128 sentences": ("BERT-base", 128, 96, 512),
    "16 documents": ("BERT-base", 16, 700, 4096),
    "32 sentences, causal": ("GPT-2", 32, 96, 512),
    "16 documents, causal": ("GPT-2", 16, 700, 4096),
}
COLUMNS = "tokens", "row", "lists", "planning_us", "host_us", "new_us", "known_us", "error", "half_error"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for packing.json and packing.md")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--only", nargs="+", default=list(CASES), help="cases (default: all)")
    options = parser.parse_args()
    need_gpu(options)
    about = {
        "gpu": torch.cuda.get_device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    rows = [{"case": name, **about, **measured(*CASES[name])} for name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "packing.json").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (options.out / "packing.md").write_text(table(rows))
    print(table(rows))
    return 0


def measured(model_name: str, batch: int, mean: int, longest: int) -> dict:
    """The fields of a row."""
    import stof_tvm

    sizes = Sizes(batch=batch, mean=mean, longest_in_batch=longest)
    case = LengthCase(BATCH, model_name, batch, longest)
    half = make_model(case, small=False).cuda()
    sets = [sizes.batch_lengths(seed) for seed in range(SETS)]  # the same lengths in another order
    width = max(sets[0])
    example = torch.full((batch, width), 5, device="cuda"), torch.ones(batch, width, dtype=torch.int64, device="cuda")
    engine = stof_tvm.build(copy.deepcopy(half), None, example, without_padding=True, verify=False)
    ids = torch.randint(5, 1000, (batch, width), device="cuda")
    mask = None
    error, half_error = errors(engine, half, ids, sets[0])
    for lengths in sets[:4]:
        engine(ids, mask, lengths=lengths)
    torch.cuda.synchronize()
    host, new, known = [], [], []
    torch.cuda.set_sync_debug_mode("error")
    for lengths in sets[4:]:
        start = time.perf_counter()
        engine(ids, mask, lengths=lengths)
        host.append(time.perf_counter() - start)
    torch.cuda.set_sync_debug_mode("default")
    for lengths in sets:
        for times in (new, known):
            torch.cuda.synchronize()
            start = time.perf_counter()
            engine(ids, mask, lengths=lengths)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    row = engine.row_for(sets[-1])
    lists = row.lists
    return {
        "tokens": sum(sets[0]),
        "row": row.row,
        "lists": 0 if lists is None else lists.count,
        "planning_us": None if lists is None else planning_us(lists),
        "host_us": middle(host),
        "new_us": middle(new),
        "known_us": middle(known),
        "samples_us": {"host": in_us(host), "new": in_us(new), "known": in_us(known)},
        "error": error,
        "half_error": half_error,
    }


def errors(engine, half, ids: torch.Tensor, lengths: list[int]) -> tuple[float, float]:
    """Largest errors of the engine, and of the model in half precision, against float32, each sequence alone."""
    exact, found, theirs, ours = copy.deepcopy(half).float(), engine(ids, None, lengths=lengths), 0.0, 0.0
    with torch.no_grad():
        for row, length in enumerate(lengths):
            alone = ids[row : row + 1, :length]
            expected = exact(alone, torch.ones_like(alone))[0]
            ours = max(ours, float((found[row, :length].float() - expected).abs().max()))
            theirs = max(theirs, float((half(alone, torch.ones_like(alone))[0].float() - expected).abs().max()))
    if not ours <= 2 * theirs:
        raise SystemExit(f"wrong results: error {ours:.3g}, PyTorch's in half precision {theirs:.3g}")
    return ours, theirs


def planning_us(lists) -> float:
    """Microseconds of the GPU for the vectors and the lists of a set of lengths."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lists.write()
    graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(9):
        first.record()
        for _ in range(REPLAYS):
            graph.replay()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) * 1e3 / REPLAYS)
    return round(statistics.median(found), 1)


def in_us(seconds: list[float]) -> list[float]:
    return [round(x * 1e6, 1) for x in seconds]


def middle(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


def table(rows: list[dict]) -> str:
    """packing.md."""
    worst = max((row["planning_us"] or float("inf")) for row in rows)
    verdict = "**pass**" if worst <= LIMIT_US else "**miss**"
    first = rows[0]
    lines = [
        "# New lengths of batches without padding",
        "",
        "Generated by `benchmarks/gpu_packing.py`; do not edit.",
        "",
    ]
    lines += [f"{first['gpu']}, {first['date']}, commit {first['commit']}, torch {first['torch']}", ""]
    lines += [
        f"Planning on the GPU takes {worst:.1f} µs at most ({LIMIT_US:.0f} wanted): {verdict}.  No call waited.",
        "",
    ]
    lines += ["| case | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    for row in rows:
        cells = [row[name] if not name.endswith("error") else f"{row[name]:.2g}" for name in COLUMNS]
        lines.append(f"| {row['case']} | " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
