"""What is compiled and why, told to whoever listens to the logger "stof_tvm": a compilation takes seconds.

Each compilation is one line at level INFO, before it begins.  As TorchDynamo does at its own limit, the eighth engine
of a graph is a WARNING, once.
"""

import logging
from collections.abc import Sequence

import torch

LOGGER = logging.getLogger("stof_tvm")
MANY = 8  # engines of a graph
SHOWN = 3  # inputs that differ, and are listed
LONGEST = 60  # characters of a value

Key = Sequence[tuple]  # of each input: a tensor's shape, or (type, repr) of a number


def tell(names: Sequence[str], key: Key, known: Key | None, engines: int, buffers: bool) -> None:
    """Log that an engine is compiled for the inputs in `key`.

    Parameters
    ----------
    names : sequence of str
        The inputs' names, of the graph.
    known : sequence, optional
        The key of the engine that was called last; None if there is none.
    engines : int
        How many engines the graph has.
    buffers : bool
        Whether a changed buffer dropped the engines that there were.
    """
    why = "a buffer has changed" if buffers else _first(names, key) if known is None else _changes(names, key, known)
    if engines + 1 == MANY:
        LOGGER.warning(
            "torch.compile(backend='stof') compiles the %dth engine of a graph, which takes seconds each time, %s.  "
            "Pad inputs to a few shapes",
            MANY,
            why,
        )
    else:
        LOGGER.info("torch.compile(backend='stof') compiles an engine, %s", why)


def _first(names: Sequence[str], key: Key) -> str:
    """The inputs of a graph's first call; TorchDynamo makes a graph for each kind of call that it tells from others."""
    given = [pair for pair in zip(names, key, strict=False) if not pair[0].startswith("self_")]  # no weights
    inputs = [f"{name} is {_text(now)}" for name, now in given]
    more = f" and {len(inputs) - SHOWN} more" if len(inputs) > SHOWN else ""
    return f"of a graph's first call: {', '.join(inputs[:SHOWN])}{more}"


def _changes(names: Sequence[str], key: Key, known: Key) -> str:
    """Which inputs are not what they were at the last call."""
    changed = [
        f"{name} is {_text(now)} and was {_text(before)}"
        for name, now, before in zip(names, key, known, strict=False)
        if now != before
    ]
    more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
    return f"because {', '.join(changed[:SHOWN])}{more}"


def _text(entry: tuple) -> str:
    is_number = len(entry) == 2 and isinstance(entry[0], type)
    text = entry[1] if is_number else str(tuple(entry))
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def names_of(placeholders: Sequence[torch.fx.Node]) -> list[str]:
    """The inputs' names without what TorchDynamo adds for its own use ("L_", "l_")."""
    return [str(node.target).removeprefix("L_").removeprefix("l_").strip("_") for node in placeholders]
