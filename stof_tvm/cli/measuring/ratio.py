"""How many times as long one system takes as another, and whether that can be told."""

import statistics

MOST_SPREAD = 1.25  # of a ratio that is sure: its third quartile over its first
UNSURE = "unsure, the times vary too much"


def ratio_of(row: dict, other: dict, busy: str | None = None) -> dict:
    """The ratio of the times of `other` to those of `row`, rows of `time_calls`.

    The calls took turns, so that the samples of a round met the same machine: the ratio is that of each round.

    Returns {"median", "quartiles": [25 %, 75 %], "is_sure"}; the machine was `busy`, if that is not None, and then
    nothing is sure, as after one round alone, or where the quartiles are far apart.
    """
    rounds = [theirs / ours for ours, theirs in zip(row["samples_ms"], other["samples_ms"], strict=True)]
    low, median, high = statistics.quantiles(rounds, method="inclusive") if len(rounds) > 1 else rounds * 3
    is_sure = busy is None and len(rounds) > 1 and high <= MOST_SPREAD * low
    return {"median": median, "quartiles": [low, high], "is_sure": is_sure}


def ratio_text(ratio: dict) -> str:
    """A ratio in words: with its spread, and without a number that looks like a result where it is unsure."""
    low, high = ratio["quartiles"]
    spread = f"in half of the rounds {low:.2f} … {high:.2f}"
    return f"{ratio['median']:.2f}, {spread}" if ratio["is_sure"] else f"{UNSURE}: {spread}; do not quote it"
