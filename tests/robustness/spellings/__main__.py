"""The long form: `python -m tests.robustness.spellings --seed 1 --programs 1000 --jobs 4`."""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.spellings", description=__doc__)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="default: the clock's")
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="the first program's index")
    parser.add_argument("--program", type=int, metavar="INDEX", help="check one program in this process, and print it")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--target", default="llvm")
    parser.add_argument("--only", metavar="FEATURE", help="programs of one feature")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="failures of each cause to make small")
    parser.add_argument("--json", type=Path, metavar="FILE", help="failures as they come, and counts, a line each")
    arguments = parser.parse_args()

    if not arguments.target.startswith("cuda"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what is forked from a process cannot use its GPU
    from tests.robustness.spellings.run import Failure, one, sweep

    if arguments.program is not None:
        return one(arguments.seed, arguments.program, arguments.only, arguments.target)
    print(f"seed {arguments.seed}", flush=True)
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(tqdm(total=arguments.programs, disable=not sys.stderr.isatty()))
        file = stack.enter_context(arguments.json.open("w")) if arguments.json else None

        def write(line: dict) -> None:
            if file is not None:
                print(json.dumps(line), file=file, flush=True)

        def told(failure: Failure | None) -> None:
            bar.update(0 if failure and failure.small else 1)
            if failure is not None:
                bar.write(failure.text())
                sys.stdout.flush()
                write(dataclasses.asdict(failure))

        names = ("seed", "first", "programs", "jobs", "target", "only", "seconds", "shrink")
        summary = sweep(**{name: getattr(arguments, name) for name in names}, told=told)
        write({"seed": arguments.seed, **summary.counted()})
    print(summary.text())
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
