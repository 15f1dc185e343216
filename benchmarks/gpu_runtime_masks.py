"""Masks that are found at run time: prediction, planning and attention, beside dense attention and block-sparse peers.

measure:  python benchmarks/gpu_runtime_masks.py --out ROWS.json [--only top_blocks …] [--systems stof,cudnn-causal]
peers:    the same with --systems fa4-causal,cudnn-bsa in an environment that has their packages
          the same with --systems fastvideo,minference in one that has theirs
merge:    python benchmarks/gpu_runtime_masks.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_runtime_masks.py --dry-run        tiny, on the CPU

Queries and keys are made up so that softmax mass lies where prompts have it: each head has SINKS first keys and COLUMNS
others, drawn at random, that all queries like, and a preference for near keys; the rest is noise.  `recall` is the
softmax mass that a rule keeps.  Times are medians over CUDA-graph replays; of ours also the rule alone, the planning
alone (block map to lists), and all but the rule: planning and attention of a map that is given.  Peers that are given
lists are compared with that; MInference predicts what it keeps, as our rule does.  Every output is checked against
float32 under what the system keeps before it is timed, and that of the replays after.
"""

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch  # noqa: E402

from benchmarks.gpu_attention import provenance  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402
from benchmarks.peers.accuracy import Reference  # noqa: E402
from benchmarks.peers.blocks import lists_of_heads  # noqa: E402
from benchmarks.peers.newest import merge_newest  # noqa: E402
from benchmarks.peers.results import write_rows  # noqa: E402
from benchmarks.peers.timing import Replays  # noqa: E402

BENCH = "runtime_masks"
SYSTEMS = ("stof", "stof-causal", "cudnn-causal", "fa4-causal", "cudnn-bsa", "fastvideo", "minference")
GIVEN_LISTS = ("cudnn-bsa", "fastvideo")
SINKS, COLUMNS = 4, 32  # keys that all queries of a head like
NEAR = 64  # tokens within which keys are liked
VERTICAL_SLASH = SINKS + COLUMNS + 4, 2 * NEAR  # columns and diagonals that are chosen
WINDOW = 2 * NEAR  # nearest diagonals that always are
DIM = 128
NARROW = (128, 32)  # of columns few keys lie beside those that are liked
BLOCK, KEPT = (64, 64), 64  # of the rule for video: how many blocks of keys each block of queries keeps
RECALL_ROWS = 256


@dataclass(frozen=True)
class Case:
    """A rule's name and the sizes of an attention in bfloat16, batch 1."""

    rule: str
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = DIM

    @property
    def label(self) -> str:
        return f"{self.rule} {self.length}"

    @property
    def causal(self) -> bool:
        return self.rule != "top_blocks"

    def stof_rule(self):
        """The rule, as the project's own."""
        from stof_tvm import masks

        runtime = masks.runtime
        if self.rule == "top_blocks":  # the fine stage of a video model's attention
            return runtime.top_blocks(KEPT, block=BLOCK)
        if self.rule == "vertical_slash":
            return runtime.vertical_slash(*VERTICAL_SLASH, sinks=SINKS, window=WINDOW, block=NARROW)
        return runtime.xattention(stride=16, mass=0.9, block=128)


CASES = [Case("top_blocks", 109632, 7, 7)]
CASES += [Case(rule, length) for length in (8192, 32768, 131072) for rule in ("vertical_slash", "xattention")]


def main() -> int:
    options = parse_arguments()
    if options.merge:
        return merge(options.merge, options.results)
    need_gpu(options)
    return measure(options, "cpu" if options.dry_run else "cuda")


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows to this file, again after every row")
    parser.add_argument("--only", nargs="+", default=[""], help="only cases whose label holds one of these texts")
    parser.add_argument("--systems", default="stof,stof-causal,cudnn-causal", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--deadline-s", default=300.0, type=float, help="seconds after which nothing more starts")
    parser.add_argument("--commit", help="the commit that is measured; default: what git says")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--merge", nargs="+", type=Path, help="make a table of these files' rows")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    return parser.parse_args(arguments)


def cases(options) -> list[Case]:
    """The cases that are asked for."""
    found = [Case(case.rule, 512, 4, 2, 32) for case in CASES[:3]] if options.dry_run else CASES
    return [case for case in found if any(text in case.label for text in options.only)]


def measure(options, device: str) -> int:
    """Measure every case by every system; 1 if some failed, were left out or are wrong."""
    start, facts, rows, left_out = time.monotonic(), provenance(options), [], []
    for case in cases(options):
        for system in options.systems.split(","):
            if not applies(system, case):
                continue
            if time.monotonic() - start > options.deadline_s:
                left_out.append(f"{case.label} {system}")
                continue
            row = {"bench": BENCH, **facts, "case": asdict(case), "system": system}
            try:
                row |= times(case, system, device)
            except Exception as error:  # one system's failure is a row, and must not end the others
                row |= {"failed": f"{type(error).__name__}: {error}"[:500]}
            rows.append(row)
            print(f"{time.monotonic() - start:5.0f} s {line(row)}", flush=True)
            if options.out:
                write_rows(options.out, rows)
    wrong = [row for row in rows if not is_right(row)]
    print(
        f"{len(rows)} rows, {len(wrong)} failed or wrong" + (f", left out: {', '.join(left_out)}" if left_out else "")
    )
    return int(bool(left_out or wrong))


def applies(system: str, case: Case) -> bool:
    """Whether a system is a peer of a case: dense ones where keys are causal, lists of blocks where all are whole."""
    if system == "minference":
        return case.rule == "vertical_slash"
    return system == "stof" or (system in GIVEN_LISTS) != case.causal


def inputs(case: Case, device: str):
    """q (1, H, S, D), k and v (1, Hkv, S, D) in bfloat16, as the first lines of this file describe them."""
    generator = torch.Generator(device).manual_seed(case.length)
    normal = lambda *shape: torch.randn(shape, device=device, generator=generator)
    heads, length, dim = case.kv_heads, case.length, case.head_dim
    group = case.q_heads // heads
    k, v, q = (normal(1, n, length, dim) for n in (heads, heads, case.q_heads))
    direction = torch.nn.functional.normalize(normal(1, heads, 1, dim), dim=-1)
    liked = torch.rand((1, heads, length), device=device, generator=generator)
    liked[..., :SINKS] = -1
    threshold = liked.kthvalue(min(SINKS + COLUMNS, length), dim=-1, keepdim=True).values
    k += (liked <= threshold)[..., None] * direction * (2.4 * dim**0.5)
    q += direction.repeat_interleave(group, 1) * (0.9 * dim**0.5)
    # Waves whose products are large where positions are near.
    angles = torch.arange(length, device=device)[:, None] * (
        torch.rand(dim // 8, device=device, generator=generator) / NEAR * 8
    )
    waves = torch.cat([angles.cos(), angles.sin()], -1) * 3
    q[..., : dim // 4] = q[..., : dim // 4] * 0.3 + waves
    k[..., : dim // 4] = k[..., : dim // 4] * 0.3 + waves
    return tuple(x.bfloat16() for x in (q, k, v))


def times(case: Case, system: str, device: str) -> dict:
    """The measurements of a case by a system."""
    q, k, v = inputs(case, device)
    rows, _, h = Reference.places(q)
    keep = rows[:, None] >= torch.arange(case.length, device=device)
    rule, block_map, kept = None, None, None
    if system == "stof":
        rule = case.stof_rule()
        block_map = rule.block_map(q, k).contiguous()
    elif system in GIVEN_LISTS:
        block_map = same_number_of_blocks(q, k)
    call = systems()[system](case, rule, block_map, q, k, v)
    if block_map is not None:
        kept = lambda heads, rows: listed_keys(block_map, BLOCK if rule is None else rule.block, case, heads, rows)
    elif system == "minference":
        lists = call.lists()
        kept = lambda heads, rows: call.keep(lists, heads, rows)
    reference = Reference(q, k, v, lambda _: keep if kept is None else kept(h, rows))
    measured = checked_median(call, reference, device)
    if measured["median_us"] is None:
        return measured
    if system == "stof":
        given = checked_median(given_map(case, rule, block_map, q, k, v), reference, device)
        if given["median_us"] is None:
            raise RuntimeError(f"with the map given the error is {given['error']}")
        measured |= {"rule_us": median(lambda: rule.block_map(q, k), device)["median_us"]}
        measured |= {"plan_us": planning_us(case, rule, block_map, device), "given_us": given["median_us"]}
        measured |= {"density": density(block_map, rule, case)}
    if system in ("stof", "minference"):
        measured |= {"recall": recalled(q, k, kept, case)}
    return measured


def listed_keys(block_map: torch.Tensor, block, case: Case, heads: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """What a block map keeps of these rows in these heads, boolean (heads, rows, S)."""
    listed = block_map.expand(1, case.q_heads, -1, -1)[0, heads][:, rows // block[0]]
    kept = listed.repeat_interleave(block[1], -1)[..., : case.length]
    return kept & (rows[:, None] >= torch.arange(case.length, device=rows.device)) if case.causal else kept


def same_number_of_blocks(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The block map of `top_blocks` in PyTorch alone: this project and some peers cannot be in one environment."""
    means = (x.unflatten(2, (-1, BLOCK[0])).mean(3, dtype=torch.float32) for x in (q, k))
    scores = torch.matmul(next(means), next(means).mT)
    chosen = scores.topk(min(KEPT, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen, True)


def systems() -> dict:
    """What makes a call of each system, from (case, rule, block map, q, k, v)."""
    return dict(zip(SYSTEMS, (stof, stof_causal, cudnn_causal, fa4_causal, cudnn_bsa, fastvideo, minference)))


def stof(case, rule, block_map, q, k, v):
    from stof_tvm import sparse_attention

    return lambda: sparse_attention(q, k, v, rule, enable_gqa=True)


def given_map(case, rule, block_map, q, k, v):
    """The same attention by a user's rule, which has the map already: planning and attention are left."""
    from stof_tvm import masks, sparse_attention

    given = masks.runtime.rule(lambda q, k: block_map, block=rule.block)
    given = given if rule.within is None else given & rule.within
    return lambda: sparse_attention(q, k, v, given, enable_gqa=True)


def stof_causal(case, rule, block_map, q, k, v):
    from stof_tvm import masks, sparse_attention

    return lambda: sparse_attention(q, k, v, masks.causal(), enable_gqa=True)


def cudnn_causal(case, rule, block_map, q, k, v):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backend = SDPBackend.CUDNN_ATTENTION if q.device.type == "cuda" else SDPBackend.MATH

    def call():
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return call


def fa4_causal(case, rule, block_map, q, k, v):
    from flash_attn.cute import flash_attn_func

    given = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def call():
        out = flash_attn_func(*given, causal=True)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return call


def cudnn_bsa(case, rule, block_map, q, k, v):
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    counts, columns = lists_of_heads(block_map)
    most = columns.shape[-1]
    equal = most if int(counts.min()) == most else None
    given = None if equal is not None else counts.contiguous()

    def call():
        found = block_sparse_attention_forward(q, k, v, columns, equal, None, given, sparse_block_size=BLOCK[0])
        return found["o_tensor"]

    return call


def fastvideo(case, rule, block_map, q, k, v):
    from benchmarks.peers.fastvideo import block_sparse, full_blocks

    attend = block_sparse(*lists_of_heads(block_map), full_blocks(case.length, str(q.device)))
    return lambda: attend(q, k, v)


def minference(case, rule, block_map, q, k, v):
    """As many columns and diagonals as our rule chooses, the same always among them.

    The package's own defaults are a thousand columns, of which 30 are the first, and 6,096 diagonals, of which 100 are
    the nearest: many times as much work for the same recall, since queries here like SINKS + COLUMNS keys.
    """
    from benchmarks.peers.minference import VerticalSlash

    return VerticalSlash(q, k, v, *VERTICAL_SLASH, SINKS, WINDOW)


def checked_median(call, reference: Reference, device: str) -> dict:
    """The error of a call, and if it is small, times; RuntimeError if a captured call computes something else."""
    error = reference.error(call())
    found = {"error": error, "half_error": reference.half_error, "median_us": None}
    if not error <= 2 * reference.half_error:
        return found

    def check(out):
        # What a call launches on another stream than the current one is no part of the graph.
        if not (replayed := reference.error(out)) <= 2 * reference.half_error:
            raise RuntimeError(
                f"a call has the error {error}, the same in a CUDA graph {replayed}: a kernel is not in it"
            )

    return found | median(call, device, check)


def median(call, device: str, check=lambda out: None) -> dict:
    """Times of a call; on a GPU `check` looks at what the replays have written."""
    replays = Replays([call], device)
    replays.warm_up()
    samples = replays.samples()
    if device == "cuda":
        check(replays.kept[-1])
    return {"median_us": sorted(samples)[len(samples) // 2], "samples_us": samples}


def planning_us(case: Case, rule, block_map: torch.Tensor, device: str) -> float | None:
    """Microseconds from the block map to lists and items; None on the CPU, whose kernels read the map."""
    if device == "cpu":
        return None
    from stof_tvm.launches.planned_lists import PlannedLists
    from tir_kernels.attention.problem import AttentionProblem, BlockMap
    from tir_kernels.attention.select import choose
    from tir_kernels.target import parse_target

    sizes = case.q_heads, case.kv_heads, case.length, case.length, case.head_dim, case.head_dim
    described = BlockMap(*block_map.shape[:2], *rule.block)
    problem = AttentionProblem(1, *sizes, "bfloat16", case.head_dim**-0.5, block_map=described)
    target = parse_target(None)
    choice = choose(problem, rule.within, target)
    plan = choice.template.plan(choice.problem, choice.config, target, choice.mask)
    lists = PlannedLists(plan, target, block_map.device)
    return median(lambda: lists(block_map.contiguous()), device)["median_us"]


def density(block_map: torch.Tensor, rule, case: Case) -> float:
    """Kept blocks over those that could be."""
    height, width = rule.block
    first = torch.arange(0, case.length, width, device=block_map.device)
    last = torch.arange(height - 1, case.length - 1 + height, height, device=block_map.device)
    possible = first <= last[:, None] if case.causal else torch.ones_like(first <= last[:, None])
    return float((block_map & possible).float().mean() / possible.float().mean())


def recalled(q, k, kept, case: Case) -> float:
    """The softmax mass of what kept(heads, rows) keeps, averaged over heads and RECALL_ROWS rows."""
    rows = torch.linspace(0, case.length - 1, min(RECALL_ROWS, case.length), device=q.device).long()
    masses = []
    for head in range(case.q_heads):
        key = k[0, head // (case.q_heads // case.kv_heads)].float()
        scores = q[0, head, rows].float() @ key.T * case.head_dim**-0.5
        if case.causal:
            scores.masked_fill_(torch.arange(case.length, device=q.device) > rows[:, None], -torch.inf)
        some = kept(torch.tensor([head], device=q.device), rows)[0]
        masses.append((scores.softmax(-1) * some).sum(-1).mean())
    return float(torch.stack(masses).mean())


def is_right(row: dict) -> bool:
    """Whether the system ran and its error is within twice PyTorch's in half precision (NaN is not)."""
    return "failed" not in row and row["error"] <= 2 * row["half_error"]


def line(row: dict) -> str:
    """A row in a line."""
    found = f"{Case(**row['case']).label} {row['system']}: "
    if "failed" in row:
        return f"{found}failed, {row['failed'][:200]}"
    if not is_right(row):
        return f"{found}WRONG, {row['error']}, PyTorch {row['half_error']}"
    found += f"{row['median_us']:.1f} µs"
    if "rule_us" in row:
        plan = "–" if row["plan_us"] is None else f"{row['plan_us']:.1f}"
        given = f", given the map {row['given_us']:.1f}" if "given_us" in row else ""
        found += f" (rule {row['rule_us']:.1f}, planning {plan}{given}), density {row['density']:.3f}"
    return found + (f", recall {row['recall']:.3f}" if "recall" in row else "")


def merge(paths: list[Path], folder: Path) -> int:
    """Write <gpu>/runtime_masks.json and .md of the files' rows; of a case and a system the newest row counts."""
    return merge_newest(paths, folder, BENCH, page, ("system",))


def page(rows: list[dict]) -> str:
    """The table of one GPU's rows: ours with its parts, and each peer's time over ours."""
    names = (
        "rule",
        "tokens",
        "heads",
        "density",
        "recall",
        "rule, µs",
        "planning, µs",
        "given the map, µs",
        "all, µs",
        "others, µs (× ours)",
    )
    lines = ["# Masks found at run time", "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    ours = [row for row in rows if row["system"] == "stof" and is_right(row)]
    for row in sorted(ours, key=lambda row: (row["case"]["length"], row["case"]["rule"])):
        case = Case(**row["case"])
        others = [
            f"{other['system']} {other['median_us']:.0f} ({compared(other, row)})"
            for other in rows
            if other["case"] == row["case"] and other["system"] != "stof" and is_right(other)
        ]
        plan = "–" if row["plan_us"] is None else f"{row['plan_us']:.1f}"
        cells = [
            case.rule, f"{case.length:,}", f"{case.q_heads} on {case.kv_heads}", f"{row['density']:.3f}",
            f"{row['recall']:.3f}", f"{row['rule_us']:.0f}", plan,
            f"{row['given_us']:.0f}" if "given_us" in row else "–", f"{row['median_us']:.0f}",
            ", ".join(sorted(others)),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    words = ["Peers that are given lists of blocks are compared with ours given the map, the others with all of ours."]
    failed = [f"- {line(row)}" for row in rows if not is_right(row)]
    told = sorted({f"{row['gpu']}, driver {row['driver']}, {row['date']}, commit {row['commit']}" for row in rows})
    return "\n".join([*lines, "", *words, "", *failed, *([""] if failed else []), *(f"{each}." for each in told), ""])


def compared(other: dict, ours: dict) -> str:
    """A peer's time over ours, of the same work where it was measured, and a peer's recall where it has its own."""
    given = other["system"] in GIVEN_LISTS and "given_us" in ours
    text = f"{other['median_us'] / ours['given_us' if given else 'median_us']:.2f}{' given the map' if given else ''}"
    return text + (f", recall {other['recall']:.3f}" if "recall" in other else "")


if __name__ == "__main__":
    sys.exit(main())
