"""What the commands share: help with an example, --json, and when to show progress."""

import argparse
import json
import sys


def new_command(commands, name: str, run, summary: str, example: str, details: str = "") -> argparse.ArgumentParser:
    """Add a command to the parser's; `run(arguments)` does it and returns its exit status, None being 0."""
    description = f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    command = commands.add_parser(name, help=summary, description=description, epilog=f"example: {example}")
    command.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    command.set_defaults(run=run)
    return command


def print_answer(arguments, data: dict, text: str) -> None:
    """The result for programs or for people, whichever was asked for."""
    print(json.dumps(data) if arguments.json else text)


def show_progress() -> bool:
    """Whether someone watches stderr, where progress bars go."""
    return sys.stderr.isatty()


def positive(text: str) -> int:
    """An argument that is an integer of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number
