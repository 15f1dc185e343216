"""Code that the commands share: the parser, help with an example, --json, and when to show progress."""

import argparse
import contextlib
import difflib
import json
import math
import os
import sys
import textwrap
from pathlib import Path

from tir_kernels.errors import InputError, MaskError, TargetError

WIDTH = 80  # of help, in characters


class UsageError(InputError):
    """Arguments that cannot be read, do not go together, or name what there is not: the command exits with 2."""


@contextlib.contextmanager
def usage():
    """A context that looks at arguments alone: its errors of masks, inputs and targets are wrong usage."""
    try:
        yield
    except (InputError, MaskError, TargetError) as error:
        raise UsageError(str(error)) from None


class Parser(argparse.ArgumentParser):
    """A parser whose errors suggest an option for each misspelled one; the parsers of its commands do so, too."""

    def parse_known_args(self, args=None, namespace=None):
        """Parse `args`; an argument left over is an error here, where the command's own options are known."""
        self._given = sys.argv[1:] if args is None else list(args)
        known, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return known, rest

    def error(self, message):
        """Exit with status 2 after the usage, the message and a suggestion for each option that does not exist."""
        given = [word.partition("=")[0] for word in self._given if word.startswith("--")]
        unknown = [word for word in given if not any(option.startswith(word) for option in self._option_string_actions)]
        near = [match for word in unknown for match in difflib.get_close_matches(word, self._option_string_actions, 1)]
        super().error("; ".join([message, *(f"did you mean {option}?" for option in near)]))


def new_command(commands, name: str, run, summary: str, example: str, details: str = "") -> argparse.ArgumentParser:
    """Add a command to `commands`; `run(arguments)` runs it and returns its exit status, where None means 0."""
    command = commands.add_parser(name, help=summary, **help_text(summary, example, details))
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(run=run, parser=command)
    return command


def help_text(summary: str, example: str, details: str = "") -> dict:
    """Arguments of `add_parser` for a description and an example; the example stays on one line, to be copied."""
    description = textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {details}", WIDTH)
    formatter = argparse.RawDescriptionHelpFormatter
    return {"description": description, "epilog": f"example: {example}", "formatter_class": formatter}


def print_answer(arguments, data: dict, text: str) -> None:
    """Print the result, as JSON with --json, else as text."""
    print(json.dumps(data) if arguments.json else text)


def show_progress() -> bool:
    """Whether someone watches stderr, where progress bars go."""
    return sys.stderr.isatty()


def show_help(parser: argparse.ArgumentParser):
    """A `run` for a parser that needs a command: prints the whole help on stderr and returns 2, wrong usage."""

    def run(_) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


def positive(text: str) -> int:
    """An argument that is an integer of at least 1 and below 2³¹."""
    if not text.isascii() or not text.isdigit() or not text.strip("0"):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} must be an integer of at least 1")
    if len(text) > 10 or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text[:20]} is too large")
    return int(text)


def positive_seconds(text: str) -> float:
    """An argument that is a number above 0."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} must be a number of seconds above 0")
    return seconds


def check_output(path: Path) -> None:
    """Raise InputError if a file cannot be written, before the work for it is done."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: the folder {path.parent} is read-only")


def picture_file(text: str) -> Path:
    """An argument that names a picture to be written."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .svg")
    return path


def use_no_display() -> None:
    """Let matplotlib draw without a window even where there is a display; call this before it is imported."""
    os.environ["MPLBACKEND"] = "Agg"
