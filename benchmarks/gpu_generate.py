"""Generation on a GPU: engines beside transformers' loop with a static cache and torch.compile.

measure:  python benchmarks/gpu_generate.py --out ROWS.json [--only "decode Qwen3" first …] [--systems A,B]
merge:    python benchmarks/gpu_generate.py --merge ROWS.json … [--results benchmarks/results]
try out:  python benchmarks/gpu_generate.py --dry-run        two narrow layers and short prompts on the CPU

Tokens a second after long prompts, at batch 1 and 16, causal and with a window, and the time to the first token.  Every
system runs in a process of its own, which compiles with others, as many as the GPU has memory for, and is timed alone.
Our engines and the peer that transformers chooses come first.  Each row is printed and saved when it is there; what
--deadline-s or a signal cuts off is measured when the command is given again.
"""

import argparse
import functools
import itertools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.generation.cases import FULL, TINY, GenerateCase, generate_cases  # noqa: E402
from benchmarks.generation.models import cache_bytes  # noqa: E402
from benchmarks.generation.report import line, page, summary  # noqa: E402
from benchmarks.generation.systems import ALL, BACKEND, OURS  # noqa: E402
from benchmarks.models.script import Job, add_options, left_over, measure, merge, parsed  # noqa: E402
from benchmarks.models.worker import Worker  # noqa: E402
from benchmarks.needs_gpu import need_gpu  # noqa: E402

WORKERS = 4
FIRST_SYSTEMS = OURS, "compile-sdpa"  # before the others, of all cases
# Memory of a process over its caches', with what a long prompt computes in.  Engines have a copy of the model beside.
OVER_CACHES, OURS_OVER_CACHES = 1.25, 2.25
BESIDE_CACHES = 8 << 30  # bytes of a process beside that: weights, CUDA's own


def main() -> int:
    options = parse_arguments()
    need_gpu(options)
    if options.merge:
        return merge("generate", GenerateCase, page, options.merge, options.results)
    return run(options)


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "generate", ALL, WORKERS)
    return parsed(parser, arguments, ALL)


def run(options) -> int:
    start = lambda cases, system: start_worker(cases, system, options)
    fit = len if options.dry_run else functools.partial(fitting, memory=gpu_memory())
    return measure("generate", GenerateCase, all_jobs(options), start, line, summary, options, fit)


def all_jobs(options) -> list[Job]:
    """A job for each case and system, a case's next to each other: FIRST_SYSTEMS of all cases, then the others."""
    cases = generate_cases(TINY if options.dry_run else FULL)
    others = [system for system in ALL if system not in FIRST_SYSTEMS]
    return [((case,), system) for systems in (FIRST_SYSTEMS, others) for case in cases for system in systems]


def gpu_memory() -> int:
    """Bytes of the GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def fitting(jobs: list[Job], memory: int) -> int:
    """How many jobs, from the first on, fit a GPU of so many bytes together; at least one."""
    over = [OURS_OVER_CACHES if system in (OURS, BACKEND) else OVER_CACHES for _, system in jobs]
    needed = [times * cache_bytes(case) + BESIDE_CACHES for times, ((case,), _) in zip(over, jobs)]
    return max(1, sum(total <= memory for total in itertools.accumulate(needed)))


def make_plan(options) -> list[Job]:
    """The jobs that are not yet among the file's rows."""
    return left_over(all_jobs(options), GenerateCase, options)


def start_worker(cases: tuple[GenerateCase], system: str, options) -> Worker:
    from benchmarks.generation.measure import get_ready

    device, sizes = ("cpu", TINY) if options.dry_run else ("cuda", FULL)
    return Worker(cases, system, get_ready, (cases, system, device, options.dry_run, sizes.runs), str(options.log))


if __name__ == "__main__":
    sys.exit(main())
