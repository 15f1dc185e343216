"""The table of commands, and the handling of their errors."""

import argparse
import os
import sys

from stof_tvm import __version__
from stof_tvm.cli.command import Parser, UsageError, show_help
from stof_tvm.cli.commands import bench, build, demo, env, logs, mask, plan, report, tune
from stof_tvm.cli.named.model_lines import model_lines
from tir_kernels.errors import StofError

COMMANDS = (demo, build, bench, report, mask, plan, tune, logs, env)

STATUSES = """\
exit status:
  0    done
  1    the command failed, with one line on stderr that says why; or its own answer is no
       (env: something needed is missing, logs verify: records no longer fit)
  2    wrong usage: arguments that cannot be read, do not go together, or name what there is not
  130  interrupted

Results are printed on stdout, with --json as one JSON object. Progress is shown on a terminal only."""


def main(argv=None) -> int:
    """Run one command and return its exit status, as `stof --help` lists them; wrong usage raises SystemExit(2)."""
    arguments = parser().parse_args(argv)
    try:
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except UsageError as error:
        return arguments.parser.error(one_line(error))
    except StofError as error:
        print(f"stof: {one_line(error)}", file=sys.stderr)
        if error.__cause__ is not None and (lines := model_lines(error.__cause__)):
            print(lines, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stof: interrupted", file=sys.stderr)
        return 130
    except (OSError, MemoryError) as error:  # a full disk, a folder that cannot be written, too little memory
        if not isinstance(error, BrokenPipeError):  # the reader of the output (`| head`) has enough
            print(f"stof: {error}", file=sys.stderr)
        _drop_output_that_fails()
        return 1
    except Exception as error:
        if not (lines := model_lines(error)):
            raise  # none of the model's lines: an error in this project
        print(f"stof: the model's code raised {type(error).__name__}: {error}\n{lines}", file=sys.stderr)
        return 1


def one_line(error: Exception) -> str:
    """The message of an error, without line breaks."""
    return " ".join(str(error).split())


def _drop_output_that_fails() -> None:
    """Drop output that cannot be written, so that Python does not try again, and complain, when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of the arguments that it parses is the chosen command's function."""
    stof = Parser(
        prog="stof",
        description="Sparse-Transformer inference on Apache TVM. 'stof COMMAND --help' shows an example.",
        epilog=STATUSES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    stof.add_argument("--version", action="version", version=f"stof_tvm {__version__}")
    stof.set_defaults(run=show_help(stof))
    commands = stof.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        command.add_command(commands)
    return stof
