"""What the commands share: help with an example, --json, and when to show progress."""

import argparse
import json
import math
import os
import sys
import textwrap
from pathlib import Path

from tir_kernels.errors import InputError

WIDTH = 80  # of help


def new_command(commands, name: str, run, summary: str, example: str, details: str = "") -> argparse.ArgumentParser:
    """Add a command to the parser's; `run(arguments)` does it and returns its exit status, None being 0."""
    command = commands.add_parser(name, help=summary, **help_text(summary, example, details))
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(run=run)
    return command


def help_text(summary: str, example: str, details: str = "") -> dict:
    """What `add_parser` takes to show a description and an example, which stays on one line, to be copied."""
    description = textwrap.fill(f"{summary[0].upper()}{summary[1:]}. {details}", WIDTH)
    formatter = argparse.RawDescriptionHelpFormatter
    return {"description": description, "epilog": f"example: {example}", "formatter_class": formatter}


def print_answer(arguments, data: dict, text: str) -> None:
    """The result for programs or for people, whichever was asked for."""
    print(json.dumps(data) if arguments.json else text)


def show_progress() -> bool:
    """Whether someone watches stderr, where progress bars go."""
    return sys.stderr.isatty()


def show_help(parser: argparse.ArgumentParser):
    """The `run` of a parser that needs a command: the whole help on stderr, wrong usage."""

    def run(_) -> int:
        parser.print_help(sys.stderr)
        return 2

    return run


def positive(text: str) -> int:
    """An argument that is an integer of at least 1, of at most 32 bits."""
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
    """InputError where a file cannot be written, before the work that it is to hold is done."""
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
    """Draw without a window, whatever display there is; before matplotlib is imported."""
    os.environ["MPLBACKEND"] = "Agg"
