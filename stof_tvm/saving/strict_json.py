"""Strict reading of JSON that this project wrote, so that damage is found when a file is read."""

import json
import math


def read_json(text: str | bytes):
    """The value of a JSON text in UTF-8.

    ValueError for text that is not JSON, and where Python's reader is too lenient or fails otherwise: numbers that are
    not finite, a name twice in one object, characters that no text can hold (lone surrogates), and more levels than
    Python's stack has.
    """
    if isinstance(text, bytes):
        text = text.decode()
    try:
        value = json.loads(
            text, parse_float=_finite, parse_constant=_no_constant, object_pairs_hook=_without_repetition
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if "\\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _no_constant(text: str):
    raise ValueError(f"{text} is no number of JSON")


def _without_repetition(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the name {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found
