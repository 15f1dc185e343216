"""What the sparse attention kernels must reach on this grid, and whether a set of results does."""

import math
from dataclasses import dataclass, field

from benchmarks.peers.cases import (
    DECODE_MASKS,
    GRID_MASKS,
    GRID_SHAPES,
    PART_BLOCKS_SHAPES,
    Case,
    attention_case,
    attention_cases,
    decode_cases,
)
from benchmarks.peers.published import PAPER_KERNEL_US
from benchmarks.peers.results import Results, best, floor_us
from benchmarks.peers.systems import FASTVIDEO, FLEX, WHOLE_BLOCKS

SPARSE = 0.25  # masks below this density count as sparse
LONG, SHORT = 2048, 1024
LONG_MASKS = ("document", "causal_window", "prefix", "video")  # what long contexts keep mostly in whole blocks
LONG_MASKS_FROM, LEAST_WINDOW = 4096, 512


@dataclass
class Line:
    """One requirement: speed-ups over something, at some points.

    `ratios` holds time of the other over ours at each point measured, 0 where ours failed or is wrong; `missing` the
    points without a time of the other's or ours.
    """

    what: str
    against: str
    geomean: float | None = None
    everywhere: float | None = None
    ratios: dict[Case, float] = field(default_factory=dict)
    missing: list[Case] = field(default_factory=list)

    @property
    def mean(self) -> float:
        values = self.ratios.values()
        return math.exp(sum(map(math.log, values)) / len(values)) if values and min(values) > 0 else 0.0

    @property
    def worst(self) -> tuple[Case, float]:
        return min(self.ratios.items(), key=lambda item: item[1])

    @property
    def bound(self) -> str:
        parts = [f"{self.geomean:g}× geometric mean"] if self.geomean else []
        return ", ".join(parts + ([f"{self.everywhere:.3g}× everywhere"] if self.everywhere else []))

    @property
    def verdict(self) -> str:
        """ "pass", "miss", "incomplete" (no miss, but points are missing) or "no data"."""
        if not self.ratios:
            return "no data"
        if self.geomean and self.mean < self.geomean or self.everywhere and self.worst[1] < self.everywhere:
            return "miss"
        return "incomplete" if self.missing else "pass"


def lines(results: Results) -> list[Line]:
    """The table of requirements, computed; in the order in which it is stated."""
    sparse = [
        case
        for case in (attention_case(*shape, mask) for shape in GRID_SHAPES for mask in GRID_MASKS if mask != "causal")
        if results.densities.get(case, 0) < SPARSE
    ]
    long = [case for case in sparse if case.q_len >= LONG]
    short = [case for case in sparse if case.q_len <= SHORT]
    windows = [case for case in long if case.mask == "sliding_window"]
    large = [case for case in sparse if (case.batch, case.q_len) == (16, 4096)]
    causal = [attention_case(*shape, "causal") for shape in GRID_SHAPES]
    published = list(PAPER_KERNEL_US)
    decode = [case for case in decode_cases() if case.mask in DECODE_MASKS]
    every = attention_cases()
    long_causal = [
        case for case in every if case.mask == "causal" and case.q_len >= LONG and case.head_dim in (64, 128)
    ]
    long_masks = [case for case in every if case.head_dim == 128 and case.q_len >= LONG_MASKS_FROM and _is_long(case)]
    whole = [case for case in every if case.mask.partition("-")[0] in WHOLE_BLOCKS]
    tiles = [case for case in whole if case.mask.startswith("random_tiles") and case.head_dim == 128]

    def fastest(*systems):
        return lambda case: _least(results.us(case, system) for system in systems)

    def dense_fa2(case):
        return results.us(case.with_mask("none"), "fa2")

    def floor(case):
        return floor_us(case, results.densities[case]) if case in results.densities else None

    def best_peer(case):
        found = best(results.peers(case))
        return found[1] if found else None

    def best_exact(case):
        found = best(results.peers(case, bounds=False))
        return found[1] if found else None

    def line(what, against, cases, peer, **bounds):
        result = Line(what, against, **bounds)
        for case in cases:
            ours, theirs = results.us(case, "stof"), peer(case)
            if theirs is None or (case, "stof") not in results.rows:
                result.missing.append(case)
            else:
                result.ratios[case] = theirs / ours if ours is not None else 0.0
        return result

    table = [
        line("sparse masks, S ≥ 2048", "FlexAttention, the best of its four", long, fastest(*FLEX), geomean=2.5,
             everywhere=1.3),
        line("the same", "FlexAttention, tensor mask_mod, Triton", long, lambda c: results.us(c, FLEX[0]), geomean=3.5),
        line("sliding window, S ≥ 2048", "FlashAttention-4's window", windows, lambda c: results.us(c, "fa4"),
             everywhere=1.2),
        line("sparse masks, batch 16, S 4096", "FA2 dense", large, dense_fa2, everywhere=4.8),
        line("sparse masks, S ≤ 1024", "the best peer, dense and causal ones included", short, best_peer, geomean=1.3,
             everywhere=0.95),
        line("(for information) sparse masks, S ≤ 1024", "the best peer that computes the mask", short, best_exact,
             geomean=1.3, everywhere=0.95),
        line("sparse masks, the published points", "the paper's own kernel",
             [case for case in published if case.mask != "causal"], PAPER_KERNEL_US.get, everywhere=1.2),
        line("causal", "FA2 causal", causal, lambda c: results.us(c, "fa2-causal"), geomean=1.0),
        line("causal, the published points", "the paper's own kernel",
             [case for case in published if case.mask == "causal"], PAPER_KERNEL_US.get, geomean=1.0),
        _part_blocks(results),
        line("decoding, Sq = 1", "the best peer", decode, best_peer, everywhere=1.5),
        line("causal, S ≥ 2048, D 64 and 128", "the best of cuDNN, FlashAttention-4 and cuDNN's flex_attention",
             long_causal, fastest("cudnn-causal", "fa4", "cudnn-flex"), geomean=1.02, everywhere=0.97),
        line("documents, causal windows ≥ 512, prefix, video tiles, S ≥ 4096, D 128",
             "the best of FlexAttention's forms, FlashAttention-4, cuDNN's flex_attention and FastVideo's blocks",
             long_masks, fastest(*FLEX, "fa4", "cudnn-flex", *FASTVIDEO), geomean=1.05, everywhere=0.97),
        line("whole blocks at random", "the better of cuDNN's block_sparse_attention and FastVideo's blocks", tiles,
             fastest("cudnn-bsa", *FASTVIDEO), geomean=1.1),
        *(line(f"whole blocks, heads of {dim}", "the rate of a large matrix product, 790 TFLOP/s",
               [case for case in whole if case.head_dim == dim], floor, everywhere=least)
          for dim, least in ((128, 0.76), (64, 0.58))),
        line("sparse masks of the grid, S ≥ 2048", "the best of FlexAttention's forms and cuDNN's flex_attention", long,
             fastest(*FLEX, "cudnn-flex"), geomean=2.5, everywhere=1.05),
    ]  # fmt: skip
    return table


def _part_blocks(results: Results) -> Line:
    """Time with full blocks over time with part blocks, the same blocks listed."""
    line = Line("part blocks", "the same mask with blocks all full (at most 10 % slower)", everywhere=1 / 1.1)
    for shape in PART_BLOCKS_SHAPES:
        part, full = (attention_case(*shape, mask) for mask in ("part_blocks", "full_blocks"))
        times = results.us(full, "stof"), results.us(part, "stof")
        if (part, "stof") not in results.rows or times[0] is None:
            line.missing.append(part)
        else:
            line.ratios[part] = times[0] / times[1] if times[1] is not None else 0.0
    return line


def _is_long(case: Case) -> bool:
    """Whether the mask is one of LONG_MASKS; of windows, those of at least LEAST_WINDOW keys."""
    base, _, argument = case.mask.partition("-")
    return base in LONG_MASKS and (base != "causal_window" or float(argument) >= LEAST_WINDOW)


def _least(times) -> float | None:
    return min((us for us in times if us is not None), default=None)
