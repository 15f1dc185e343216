"""Lengths that change from call to call on a GPU: an engine of a range beside torch.compile for many shapes.

measure:  python benchmarks/gpu_lengths.py --out ROWS.json [--only "length BERT" batch …] [--systems A,B] [--mode lazy]
merge:    python benchmarks/gpu_lengths.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_lengths.py --dry-run        two narrow layers and a few short lengths on the CPU

Random lengths of three models, some of them beside engines of their own; a batch of unequal lengths, padded; the
memory of a range.  A process measures a system at all of a model's lengths: it calls each for the first time, checks
the results, and times the calls.  Ranges of all models come first.  Each row is printed and saved when it is there;
what --deadline-s or a signal cuts off is measured when the command is given again.
"""

import argparse
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.lengths.cases import (  # noqa: E402
    BATCH,
    FULL,
    LENGTH,
    MEMORY,
    MODELS,
    TINY,
    LengthCase,
    Sizes,
    length_cases,
)
from benchmarks.lengths.report import line, page, summary  # noqa: E402
from benchmarks.lengths.systems import (  # noqa: E402
    ALL,
    BUCKETS,
    COMPILED,
    DYNAMIC,
    FIXED,
    LAZY,
    MODES,
    OURS,
    RANGE,
    best_mode,
)
from benchmarks.models.script import Job, add_options, left_over, measure, merge, parsed  # noqa: E402
from benchmarks.models.worker import Worker  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402

WORKERS = 9
LAZY_CHUNK = 5  # lengths of a process where each is compiled when it comes


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.merge:
        return merge("lengths", LengthCase, page, options.merge, options.results)
    return run(options)


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "lengths", ALL, WORKERS)
    parser.add_argument(
        "--mode", choices=MODES, help="when a range is compiled; default: ahead, or lazy where build has only that"
    )
    parser.add_argument(
        "--buckets",
        type=lambda text: tuple(map(int, text.split(","))),
        help="lengths for which a range is compiled ahead, split at ','; default: build's own",
    )
    parser.add_argument("--lengths", type=int, help="only the first ones of the random lengths; default: all")
    options = parsed(parser, arguments, ALL)
    if options.lengths is not None and options.lengths < 1:
        parser.error("--lengths is a number from 1 on")
    if options.buckets and options.mode == LAZY:
        parser.error("--buckets are for --mode ahead")
    return options


def run(options) -> int:
    options.mode = options.mode or best_mode()
    start = lambda cases, system: start_worker(cases, system, options)
    return measure("lengths", LengthCase, all_jobs(options), start, line, summary, options)


def all_jobs(options) -> list[Job]:
    """The cases that a process measures, and for which system.

    First come ranges of all models, ours and the peer's beside each other, then a batch, then engines of one shape.
    """
    sizes = _sizes(options)
    cases, fixed, taken = length_cases(sizes), sizes.fixed_lengths(), sizes.lengths()[: options.lengths]
    of_model = {
        model: tuple(
            c for c in cases if c.model == model and (c.kind == MEMORY or c.kind == LENGTH and c.length in taken)
        )
        for model in MODELS
    }
    jobs: list[Job] = []
    for systems in ((OURS, DYNAMIC), (BUCKETS,)):
        for lengths, system in itertools.product(of_model.values(), systems):
            step = LAZY_CHUNK if system == OURS and options.mode == LAZY else len(lengths)
            jobs += [(lengths[at : at + step], system) for at in range(0, len(lengths), step)]
    batches = [case for case in cases if case.kind == BATCH]
    jobs += [((case,), system) for case in batches for system in (*RANGE, FIXED, COMPILED)]
    own = [c for lengths in of_model.values() for c in lengths if c.kind == MEMORY or c.length in fixed]
    return jobs + [((case,), FIXED) for case in own]


def make_plan(options) -> list[Job]:
    """The jobs that are not yet among the file's rows."""
    return left_over(all_jobs(options), LengthCase, options)


def start_worker(cases: tuple[LengthCase, ...], system: str, options) -> Worker:
    from benchmarks.lengths.measure import get_ready

    device = "cpu" if options.dry_run else "cuda"
    arguments = cases, system, options.mode, device, options.dry_run, _sizes(options), options.buckets
    return Worker(cases, system, get_ready, arguments, str(options.log))


def _sizes(options) -> Sizes:
    return TINY if options.dry_run else FULL


if __name__ == "__main__":
    sys.exit(main())
