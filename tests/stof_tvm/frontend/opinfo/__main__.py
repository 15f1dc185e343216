"""The long form: `python -m tests.stof_tvm.frontend.opinfo [--only NAME]… [--dtype D]… [--jobs J] [--json FILE]`."""

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from multiprocessing.connection import wait
from pathlib import Path

from tests.stof_tvm.frontend.opinfo.checking import Outcome, check, warm_up
from tests.stof_tvm.frontend.opinfo.samples import DTYPES, operators


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stof_tvm.frontend.opinfo", description=__doc__)
    parser.add_argument("--only", action="append", metavar="REGEX", help="operators whose whole name matches")
    parser.add_argument("--dtype", action="append", choices=DTYPES)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--cap", type=int, default=6, help="PyTorch's samples of an operator and dtype")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--seconds", type=float, default=300, help="of one operator in one dtype")
    parser.add_argument("--refused", action="store_true", help="list what is refused, too")
    arguments = parser.parse_args()
    table = operators()
    names = [n for n in table if not arguments.only or any(re.fullmatch(o, n) for o in arguments.only)]
    work = [(name, dtype) for name in names for dtype in arguments.dtype or DTYPES]
    warm_up()
    total, results = Counter(), {}
    for (name, dtype), outcome in _in_processes(table, work, arguments):
        print(f"{name} {dtype} {dict(outcome.counts)}", file=sys.stderr, flush=True)
        total += outcome.counts
        if outcome.counts:
            results.setdefault(name, {})[dtype] = dict(outcome.counts) | {"why": outcome.reasons()}
            _write(results, arguments.json)
        for line in outcome.lines:
            if arguments.refused or not line.startswith("refused"):
                print(f"{name} {dtype} {line}", flush=True)
    print(", ".join(f"{kind} {count}" for kind, count in sorted(total.items())))
    return 1 if total["wrong"] or total["crashed"] else 0


def _write(results, path):
    """As results come, so that a run that is cut short leaves what it has."""
    if path:
        Path(path).write_text(json.dumps(results, indent=0, sort_keys=True) + "\n")


def _in_processes(table, work, arguments):
    """Outcomes of (name, dtype), each from a process of its own: some operators may end it."""
    context, work, running = multiprocessing.get_context("fork"), list(reversed(work)), {}
    while work or running:
        while work and len(running) < arguments.jobs:
            item = work.pop()
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(writer, table[item[0]], DTYPES[item[1]], arguments.cap))
            process.start()
            writer.close()
            running[reader] = item, process, time.monotonic() + arguments.seconds
        for reader in wait(list(running), timeout=1.0):
            item, process, _ = running.pop(reader)
            try:
                outcome = reader.recv()
            except EOFError:
                process.join()
                outcome = _lost(f"the process ended with {process.exitcode}")
            process.join()
            yield item, outcome
        for reader, (item, process, until) in list(running.items()):
            if time.monotonic() > until:
                running.pop(reader)
                process.kill()
                yield item, _lost(f"not done after {arguments.seconds:.0f} s")


def _lost(why) -> Outcome:
    return Outcome(Counter(crashed=1), [f"crashed: {why}"])


def _send(writer, info, dtype, cap):
    writer.send(check(info, dtype, cap))


if __name__ == "__main__":
    sys.exit(main())
