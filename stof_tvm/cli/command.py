"""What the commands share: help with an example, --json, and when to show progress."""

import argparse
import json
import os
import sys
import textwrap
from pathlib import Path

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


def positive(text: str) -> int:
    """An argument that is an integer of at least 1, of at most 32 bits."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]} must be at least 1")
    if number >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text[:20]} is too large")
    return number


def picture_file(text: str) -> Path:
    """An argument that names a picture to be written."""
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .svg")
    return path


def use_no_display() -> None:
    """Draw without a window, whatever display there is; before matplotlib is imported."""
    os.environ["MPLBACKEND"] = "Agg"
