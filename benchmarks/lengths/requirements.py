"""What engines of a range must reach, and whether a set of results does."""

import math

from benchmarks.lengths.cases import BATCH, LENGTH, MEMORY, LengthCase
from benchmarks.lengths.systems import BUCKETS, COMPILED, DYNAMIC, FIXED, OURS
from benchmarks.models.results import ModelResults
from benchmarks.peers.targets import Line

SLOWER, MEMORY_TIMES, FIRST_TIMES = 1.08, 1.1, 3.0  # at most


def lines(results: ModelResults) -> list[Line]:
    """The table of requirements, computed; a ratio is the other's number over ours."""
    lengths = [case for case in results.cases() if case.kind == LENGTH]
    batches = [case for case in results.cases() if case.kind == BATCH]
    memory = [case for case in results.cases() if case.kind == MEMORY]
    fixed = [case for case in lengths if (case, FIXED) in results.rows]
    padded = (DYNAMIC, BUCKETS, COMPILED)
    return [
        _times("random lengths, on the device", lengths, results, (DYNAMIC,), "median_us", 1.3, 1.05),
        _times("random lengths, latency", lengths, results, (BUCKETS,), "wall_us", 1.3, 1.05),
        _times("lengths with an engine of their own", fixed, results, (FIXED,), "median_us", None, 1 / SLOWER),
        _first(lengths, results),
        _times("batch of unequal lengths", batches, results, padded, "median_us", None, 2.5),
        _times("the same", batches, results, (FIXED,), "median_us", None, 2.0),
        _memory(memory, results),
    ]


def first_ratio(results: ModelResults, model: str) -> float | None:
    """How many times as long as its median call the 99th percentile of the first calls at a length takes."""
    rows = [
        row
        for (case, system), row in results.rows.items()
        if system == OURS and case.kind == LENGTH and case.model == model and results.us(case, OURS) is not None
    ]
    ratios = sorted(row["first_us"] / row["wall_us"] for row in rows)
    return ratios[math.ceil(0.99 * len(ratios)) - 1] if ratios else None


def _times(what, cases, results: ModelResults, peers, field: str, geomean, everywhere) -> Line:
    """Times of the fastest of `peers` over ours; against a fixed engine lengths that have one."""
    line = Line(what, " or ".join(f"`{peer}`" for peer in peers), geomean, everywhere)
    for case in cases:
        theirs = [us for peer in peers if (us := results.us(case, peer, field)) is not None]
        ours = results.us(case, OURS, field)
        if not theirs or (case, OURS) not in results.rows:
            line.missing.append(case)
        else:
            line.ratios[case] = 0.0 if ours is None else min(theirs) / ours
    return line


def _first(cases: list[LengthCase], results: ModelResults) -> Line:
    """The median call over the 99th percentile of first calls, a ratio for each model."""
    line = Line("first call at a length, 99th percentile", "its median call", None, 1 / FIRST_TIMES)
    for model in sorted({case.model for case in cases}):
        at = next(case for case in cases if case.model == model)
        found = first_ratio(results, model)
        if found is None:
            line.missing.append(at)
        else:
            line.ratios[at] = 1 / found
    return line


def _memory(cases: list[LengthCase], results: ModelResults) -> Line:
    line = Line("memory, MiB at most", f"`{FIXED}` of the longest", None, 1 / MEMORY_TIMES)
    for case in cases:
        ours, theirs = (results.rows.get((case, system), {}).get("peak_mb") for system in (OURS, FIXED))
        if ours is None or theirs is None:
            line.missing.append(case)
        else:
            line.ratios[case] = theirs / ours
    return line
