"""What generation must reach, and whether a set of results does."""

from benchmarks.generation.cases import DECODE, FIRST, FULL, GenerateCase
from benchmarks.generation.systems import OURS, PEERS
from benchmarks.models.results import ModelResults
from benchmarks.peers.results import best
from benchmarks.peers.targets import Line


def ratio(results: ModelResults, case: GenerateCase, ours: str = OURS) -> float | None:
    """How many times slower the faster peer is; 0 where ours failed or is wrong, None where one was not measured."""
    fastest = best({peer: us for peer in PEERS if (us := results.us(case, peer)) is not None})
    if fastest is None or (case, ours) not in results.rows:
        return None
    us = results.us(case, ours)
    return 0.0 if us is None else fastest[1] / us


def lines(results: ModelResults) -> list[Line]:
    """The table of requirements, computed."""
    peers = "transformers' static cache, torch.compile"
    decode = [case for case in results.cases() if case.kind == DECODE]
    long = [case for case in decode if case.window and case.cache == max(FULL.caches)]
    first = [case for case in results.cases() if case.kind == FIRST]
    return [
        _filled(Line("tokens a second", peers, None, 1.2), decode, results),
        _filled(Line(f"tokens a second with windows at {max(FULL.caches)}", "the same", None, 2.0), long, results),
        _filled(Line("first token, with a window", "the same", None, 1.5), first, results),
    ]


def _filled(line: Line, cases: list[GenerateCase], results: ModelResults) -> Line:
    for case in cases:
        found = ratio(results, case)
        if found is None:
            line.missing.append(case)
        else:
            line.ratios[case] = found
    return line
