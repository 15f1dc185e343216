"""The command line, `stof`."""

import logging
import sys

from stof_tvm import __version__


def main(argv=None) -> int:
    """Run one command and return its exit status (table.py); `--version` alone needs no further imports."""
    given = sys.argv[1:] if argv is None else list(argv)
    if given == ["--version"]:
        print(f"stof_tvm {__version__}")
        return 0
    from stof_tvm.cli import table

    # It tells tracebacks of what a model does with shapes, before the command tells the error in one line.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    return table.main(given)
