"""The argument `--lengths`: a range of lengths and, for `stof bench`, those in it that are timed."""

import argparse
import random
from dataclasses import dataclass

from stof_tvm.cli.command import positive

COUNT, MOST = 10, 1000  # random lengths, and the most of them: each takes a second, or a compilation


@dataclass(frozen=True)
class Lengths:
    """The range from `least` to `most`, and the lengths in it that are timed, in the order of their first calls."""

    least: int
    most: int
    timed: tuple[int, ...]


def length_range(text: str) -> Lengths:
    """An argument that is LEAST:MOST."""
    if text.count(":") != 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be LEAST:MOST, such as 128:4096")
    return lengths(text)


def lengths(text: str) -> Lengths:
    """An argument that is LEAST:MOST (random lengths), LEAST:MOST:COUNT, or some lengths, split at ','."""
    if ":" not in text:
        given = tuple(positive(part) for part in text.split(","))
        if len(set(given)) < 2:
            raise argparse.ArgumentTypeError(f"{text!r} must be several lengths, such as 128,512, or a range, 128:4096")
        return Lengths(min(given), max(given), tuple(dict.fromkeys(given)))
    parts = text.split(":")
    if len(parts) > 3:
        raise argparse.ArgumentTypeError(f"{text!r} must be LEAST:MOST or LEAST:MOST:COUNT")
    least, most, *rest = map(positive, parts)
    if least >= most:
        raise argparse.ArgumentTypeError(f"{text!r} is no range: {least} must be less than {most}")
    count = min(rest[0] if rest else COUNT, most - least + 1, MOST)
    return Lengths(least, most, tuple(random.Random(0).sample(range(least, most + 1), count)))
