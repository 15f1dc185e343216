"""Sparse attention of a sequence that GPUs share, beside one GPU: efficiency, rate, bytes.

measure:  torchrun --nproc-per-node 2 benchmarks/gpu_context_parallel.py --out ROWS.json [--only "window 131072" …]
merge:    python benchmarks/gpu_context_parallel.py --merge ROWS.json … [--results benchmarks/results]
try out:  torchrun --nproc-per-node 2 benchmarks/gpu_context_parallel.py --dry-run     tiny, with gloo on the CPU

Window with sinks, causal documents and BigBird at 131,072 and 1,048,576 tokens; heads of 128, 32 on 8, bfloat16, batch
1.  Every result is checked against float32 at sampled rows first.  A GPU's time is device events around several calls;
a sample is the slowest rank's, and the median of samples counts.  One GPU is rank 0 alone.
"""

import argparse
import datetime
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.accuracy import Reference  # noqa: E402
from benchmarks.peers.newest import merge_newest  # noqa: E402
from benchmarks.peers.results import write_rows  # noqa: E402

BENCH = "context_parallel"
LENGTHS = (131072, 1048576)
TINY = 1024
HEADS, KV_HEADS, DIM = 32, 8, 128
MOST_ELEMENTS = 1 << 31  # of a tensor of a kernel, which has 32-bit indices: heads are computed in parts
SAMPLES, CALLS = 7, 3
TIMEOUT = datetime.timedelta(minutes=9)  # one GPU chooses a kernel for a million tokens while the others wait


@dataclass(frozen=True)
class Case:
    """A mask's name and a length, with the sizes of the heads."""

    mask: str
    length: int
    q_heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = DIM
    dtype: str = "bfloat16"

    @property
    def label(self) -> str:
        return f"{self.mask} {self.length}"

    @property
    def parts(self) -> int:
        """Into how many calls the heads are parted."""
        most = -(-self.length * self.q_heads * self.head_dim // (MOST_ELEMENTS - 1))
        return next(n for n in range(most, self.kv_heads + 1) if self.kv_heads % n == 0)

    def stof_mask(self):
        """The mask, as the project's own."""
        from stof_tvm import masks

        if self.mask == "window":
            return masks.a_shape(min(64, self.length // 64), min(4096, self.length // 8))
        if self.mask == "documents":
            return masks.document(document_lengths(self.length)) & masks.causal()
        fill = 0.1 if self.length <= LENGTHS[0] else 0.01
        return masks.bigbird(window=128, global_tokens=128, random_fill=fill)


MASKS = ("window", "documents", "bigbird")


def document_lengths(length: int) -> list[int]:
    """Lengths of documents, drawn with a seed: a 32nd to a quarter of 131,072 tokens, or of shorter sequences."""
    most = min(length, LENGTHS[0]) // 4
    draw, found = np.random.default_rng(0), []
    while sum(found) < length:
        found.append(int(draw.integers(most // 8, most)))
    found[-1] -= sum(found) - length
    return found


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return merge(options.merge, options.results)
    need_gpu(options)
    if "RANK" not in os.environ:
        print("gpu_context_parallel.py: start it by torchrun --nproc-per-node 2", file=sys.stderr)
        return 2
    rank = int(os.environ["LOCAL_RANK"])
    if not options.dry_run:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if options.dry_run else "nccl", timeout=TIMEOUT)
    try:
        return measure(options, "cpu" if options.dry_run else f"cuda:{rank}")
    finally:
        dist.destroy_process_group()


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this file, again after every case")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--deadline-s", default=300.0, type=float, help="seconds after which no further case starts")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make a table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def cases(options) -> list[Case]:
    """The cases that are asked for, short ones first."""
    if options.dry_run:
        found = [Case(mask, TINY, 4, 2, 16) for mask in MASKS]
    else:
        found = [Case(mask, length) for length in LENGTHS for mask in MASKS]
    return [case for case in found if any(text in case.label for text in options.only)]


def measure(options, device: str) -> int:
    """Measure every case; 1 if some were left out or are wrong."""
    start, facts, rows, left_out = time.monotonic(), provenance(options), [], []
    for case in cases(options):
        # One rank's clock decides for all.
        late = torch.tensor([time.monotonic() - start > options.deadline_s], dtype=torch.uint8, device=device)
        dist.broadcast(late, 0)
        if late.item():
            left_out.append(case.label)
            continue
        row = {"bench": BENCH, **facts, "case": asdict(case), "gpus": dist.get_world_size(), **times(case, device)}
        rows.append(row)
        if dist.get_rank() == 0:
            print(f"{time.monotonic() - start:5.0f} s {line(row)}", flush=True)
            if options.out:
                write_rows(options.out, rows)
    wrong = [row for row in rows if not is_right(row)]
    if dist.get_rank() == 0:
        print(f"{len(rows)} cases, {len(wrong)} wrong" + (f", left out: {', '.join(left_out)}" if left_out else ""))
    return int(bool(left_out or wrong))


def times(case: Case, device: str) -> dict:
    """The measurements of a case, on every rank the same but for the seconds of preparation."""
    from stof_tvm import sparse_attention
    from stof_tvm.parallel import context_plan

    rank, ranks = dist.get_rank(), dist.get_world_size()
    mask, began = case.stof_mask(), time.monotonic()
    plan = context_plan(mask, case.length, ranks)
    planned = time.monotonic() - began
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(
            1, heads, case.length, case.head_dim, device=device, dtype=getattr(torch, case.dtype), generator=generator
        )
        for heads in (case.q_heads, case.kv_heads, case.kv_heads)
    )
    reference = Reference(q, k, v, lambda rows: kept_rows(mask, case.length, rows))
    own = [plan.shard(x, rank).contiguous() for x in (q, k, v)]

    def attend(inputs, **shared):
        """The heads in parts, one call each."""
        parts = zip(*(x.chunk(case.parts, 1) for x in inputs), strict=True)
        outs = [sparse_attention(*part, mask, enable_gqa=True, **shared) for part in parts]
        return outs[0] if len(outs) == 1 else outs

    def together():
        return attend(own, group=dist.group.WORLD, plan=plan)

    def alone():
        return attend((q, k, v))

    error = largest(_error(reference, together(), plan, rank), device)
    many = [largest(sample, device) for sample in samples(together, device)]
    single, alone_error = [0.0], 0.0
    if rank == 0:
        alone_error = _error(reference, alone(), None, 0)
        single = samples(alone, device)
    one_us, us = largest(float(np.median(single)), device), float(np.median(many))
    flops = 4 * case.head_dim * case.q_heads * mask.density(case.length) * case.length**2
    return {
        "median_us": us,
        "samples_us": many,
        "one_gpu_us": one_us,
        "efficiency": one_us / us / ranks,
        "tflops_a_gpu": flops / us / ranks / 1e6,
        "received_bytes": received_bytes(together, device),
        "least_bytes": least_bytes(mask, plan, case, rank),
        "imbalance": plan.imbalance,
        "way": plan.way,
        "plan_s": planned,
        "predicted": predicted(case, mask, ranks),
        "error": error,
        "one_gpu_error": largest(alone_error, device),
        "half_error": reference.half_error,
    }  # fmt: skip


def kept_rows(mask, length: int, rows: torch.Tensor) -> torch.Tensor:
    """What some rows of a mask keep: boolean (rows, length)."""
    pattern, columns = mask.bind(length, length), np.arange(length)[None]
    kept = np.empty((len(rows), length), np.bool_)
    for number, row in enumerate(rows.tolist()):  # one at a time: a rectangle of far rows would be filled in between
        kept[number] = pattern.keep(np.array([[row]]), columns)[0]
    return torch.from_numpy(kept).to(rows.device)


def _error(reference: Reference, out, plan, rank: int) -> float:
    """The largest error of a rank's rows among the sampled ones; NaN where its output is not finite."""
    out = torch.cat(out, 1) if isinstance(out, list) else out
    if not bool(out.isfinite().all()):
        return float("nan")
    rows, mine = reference.rows, slice(None)
    if plan is not None:
        place = torch.full((plan.length,), -1).index_copy(0, plan.tokens(rank), torch.arange(out.shape[2]))
        rows = place.to(rows.device)[rows]
        mine = rows >= 0
        rows = rows[mine]
    if not len(rows):
        return 0.0
    sample = out[reference.b, reference.h][:, rows].float()
    return float((sample - reference.expected[:, mine]).abs().max())


def samples(call, device: str) -> list[float]:
    """Microseconds of a call, SAMPLES times the mean of CALLS in a row, after two calls."""
    for _ in range(2):
        call()
    found = []
    for _ in range(SAMPLES):
        if device == "cpu":
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            found.append((time.perf_counter() - begin) * 1e6 / CALLS)
            continue
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        first.record()
        for _ in range(CALLS):
            call()
        last.record()
        last.synchronize()
        found.append(first.elapsed_time(last) * 1000 / CALLS)
    return found


def largest(value: float, device: str) -> float:
    """The largest of all ranks' values, NaN if one is."""
    values = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value], dtype=torch.float64, device=device))
    found = [float(x) for x in values]
    return float("nan") if any(np.isnan(found)) else max(found)


def received_bytes(together, device: str) -> int:
    """Bytes that all ranks receive in one call, counted where they are received."""
    counted, move = [], dist.all_to_all_single

    def counting(output, *arguments, **named):
        counted.append(output.nbytes)
        return move(output, *arguments, **named)

    dist.all_to_all_single = counting
    try:
        together()
    finally:
        dist.all_to_all_single = move
    return _sum(sum(counted), device)


def least_bytes(mask, plan, case: Case, rank: int) -> int:
    """The least that the mask allows for these tokens: keys and values of others that a rank's rows keep.

    Found from the mask's elements, some rows at a time, not from its lists; at most 32,768 tokens.  Longer sequences
    have what the plan says, which tests compare with the elements of short ones.
    """
    bytes_of_token = 2 * case.kv_heads * case.head_dim * getattr(torch, case.dtype).itemsize
    if case.length > 32768:
        return int(plan.received_tokens(1).sum()) * bytes_of_token
    mine = plan.tokens(rank)
    needed = torch.zeros(case.length, dtype=torch.bool)
    for some in mine.split(1024):
        needed |= kept_rows(mask, case.length, some).any(0)
    needed[mine] = False
    return _sum(int(needed.sum()) * bytes_of_token, "cpu" if dist.get_backend() == "gloo" else f"cuda:{rank}")


def _sum(value: int, device) -> int:
    total = torch.tensor([value], dtype=torch.int64, device=device)
    dist.all_reduce(total)
    return int(total)


def predicted(case: Case, mask, ranks: int) -> dict | None:
    """What `stof plan` predicts of the attention, in µs; None on a CPU, and where the prediction itself takes long."""
    if not torch.cuda.is_available() or case.length > LENGTHS[0]:
        return None
    from stof_tvm.parallel.planning.links import Links
    from stof_tvm.parallel.planning.meshes import Simulation
    from stof_tvm.parallel.planning.model import PlannedModel
    from tir_kernels.target import parse_target

    sizes = case.length, 1, 1, case.q_heads, case.kv_heads, case.head_dim, case.q_heads * case.head_dim, 0, False
    simulation = Simulation(mask, PlannedModel(*sizes, case.dtype), parse_target(None), Links())
    one, many = simulation.on_one(), simulation.on(1, ranks)
    return {"one_gpu_us": one.own_us, "us": many.layer_us - many.products_us - many.norms_us}


def is_right(row: dict) -> bool:
    """Whether both errors are within twice PyTorch's in the inputs' precision (NaN is not)."""
    most = 2 * row["half_error"]
    return row["error"] <= most and row["one_gpu_error"] <= most


def line(row: dict) -> str:
    """A row in a line."""
    found = (
        f"{Case(**row['case']).label}: {row['median_us']:.0f} µs on {row['gpus']}, {row['one_gpu_us']:.0f} µs on one"
    )
    found += f", efficiency {row['efficiency']:.3f}, {row['tflops_a_gpu']:.0f} TFLOP/s a GPU"
    found += f", {row['received_bytes'] / 2**20:.1f} MiB moved of {row['least_bytes'] / 2**20:.1f}"
    return found if is_right(row) else f"{found}: WRONG, {row['error']}, PyTorch {row['half_error']}"


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/context_parallel.json and .md of the files' rows; of a case the newest row counts."""
    return merge_newest(paths, folder, BENCH, page, ("gpus",))


def page(rows: list[dict]) -> str:
    """The table of one GPU's rows."""
    names = (
        "mask", "tokens", "GPUs", "one GPU, µs", "µs", "efficiency", "TFLOP/s a GPU", "MiB moved", "least",
        "predicted, µs", "right",
    )  # fmt: skip
    lines = ["# One sequence on several GPUs", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for row in sorted(rows, key=lambda row: (row["case"]["length"], row["case"]["mask"], row["gpus"])):
        guess = "–" if row["predicted"] is None else f"{row['predicted']['us']:.0f}"
        cells = [
            row["case"]["mask"], f"{row['case']['length']:,}", str(row["gpus"]), f"{row['one_gpu_us']:.0f}",
            f"{row['median_us']:.0f}", f"{row['efficiency']:.3f}", f"{row['tflops_a_gpu']:.0f}",
            f"{row['received_bytes'] / 2**20:.1f}", f"{row['least_bytes'] / 2**20:.1f}", guess,
            "yes" if is_right(row) else "no",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    told = sorted({f"{row['gpu']}, driver {row['driver']}, {row['date']}, commit {row['commit']}" for row in rows})
    return "\n".join([*lines, "", *(f"{each}." for each in told), ""])


if __name__ == "__main__":
    sys.exit(main())
