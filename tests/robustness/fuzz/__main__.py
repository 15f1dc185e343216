"""The long form: `python -m tests.robustness.fuzz --inputs 100000 --save findings`."""

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from tests.robustness.fuzz.run import make_input, run
from tests.robustness.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 1_000_000, help="default: the clock's")
    parser.add_argument("--save", type=Path, default=Path("build/fuzz"), help="folder for inputs that find something")
    parser.add_argument("--only", choices=[target.name for target in TARGETS])
    parser.add_argument("--input", type=int, metavar="NUMBER", help="check one input of the seed, in this process")
    arguments = parser.parse_args()
    targets = [target for target in TARGETS if arguments.only in (None, target.name)]
    print(f"seed {arguments.seed}", flush=True)
    if arguments.input is not None:
        return _check_one(targets, arguments)
    with tqdm(total=arguments.inputs, disable=not sys.stderr.isatty()) as bar:
        summary = run(targets, arguments.inputs, arguments.seed, arguments.save, lambda done: bar.update(done - bar.n))
    for (target, answer), count in sorted(summary.counts.items()):
        print(f"{target:<10}{answer:<9}{count:>8}")
    print(f"{sum(summary.counts.values())} inputs without a finding in {summary.seconds:.0f} s")
    for number, target, what in summary.findings:
        print(f"input {number} ({target}): {what.strip().splitlines()[-1]}")
    if summary.findings:
        print(f"{len(summary.findings)} findings, saved in {arguments.save}")
    return 1 if summary.findings else 0


def _check_one(targets, arguments) -> int:
    import tempfile

    target, files = make_input(targets, arguments.seed, arguments.input)
    with tempfile.TemporaryDirectory() as folder:
        print(target.name, target.check(files, Path(folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
