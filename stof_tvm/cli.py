"""The command line, `stof`."""

import argparse
import json
import sys

from stof_tvm.logs_cli import add_logs_command
from stof_tvm.tune_cli import add_tune_command
from tir_kernels.errors import StofError


def main(argv=None) -> int:
    """Run one command; 0 on success, 1 on a StofError (its message on stderr), 2 on wrong usage.

    A command may return another status of its own.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments) or 0
    except StofError as error:
        print(f"stof: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="stof", description="Sparse-Transformer inference on Apache TVM.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="compile, verify, time and save a BERT encoder with a BigBird mask",
        description="Compile, verify, time and save a BERT encoder with a BigBird mask.",
        epilog='example: stof demo --target "cuda -arch=sm_80"',
    )
    demo.add_argument("--target", help="compilation target; default: the GPU present, else LLVM")
    demo.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    demo.set_defaults(run=_demo)
    add_logs_command(commands)
    add_tune_command(commands)
    return parser


def _demo(arguments) -> None:
    from stof_tvm.demo import print_demo, run_demo

    result = run_demo(arguments.target)
    if arguments.json:
        print(json.dumps({**result, "report": result["report"].to_dict()}))
    else:
        print_demo(result)


if __name__ == "__main__":
    sys.exit(main())
