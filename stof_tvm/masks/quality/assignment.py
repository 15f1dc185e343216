"""Masks by module path, as a value that `build` takes and a file that it reads."""

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from stof_tvm.masks import runtime
from stof_tvm.masks.mask import Grid, Mask, per_head
from stof_tvm.masks.runtime.per_head import OfHeads
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.text import SHOWN, RuleGivenError, mask_text, parse_mask, parse_rule, rule_text
from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.whole_file import as_path, write_whole
from tir_kernels.errors import InputError, MaskError

FORMAT = "stof_tvm masks 1"
RULE = "rule"  # in a file, the text of a rule is {RULE: text}: masks and rules have names in common


class Assignment(Mapping[str, Mask | Rule]):
    """A mask, or a rule of `masks.runtime`, for each of some module paths or patterns, in the order given.

    Where several paths match, the last one counts.

    It is a mapping, so it may be given wherever masks by path are: `build(…, mask=assignment)`.  Files keep the order.

    Attributes
    ----------
    density : float or None
        Pairs that the masks keep, over those that the model's own masks keep, if it is known.
    loss : float or None
        The sum of the losses by which the masks were chosen, if they were.
    """

    def __init__(self, masks: Mapping[str, Mask | Rule], density: float | None = None, loss: float | None = None):
        """MaskError for keys that are no paths and values that are neither masks nor rules."""
        for path, mask in masks.items():
            if not isinstance(path, str) or not isinstance(mask, Mask | Rule):
                raise MaskError(f"masks go by paths, got {reprlib.repr(path)}: {type(mask).__name__}")
        self._masks = dict(masks)
        self.density, self.loss = density, loss

    def __getitem__(self, path: str) -> Mask | Rule:
        """The mask or rule of a path; KeyError where there is none."""
        return self._masks[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self):
        return f"<masks of {len(self)} paths{'' if self.density is None else f', {self.density:.1%} kept'}>"

    def __str__(self):
        lines = [repr(self).strip("<>")]
        for path, mask in self.items():
            texts = [repr(entry) for entry in _heads(mask)]
            lines += [f"  {path or '(the model)'}", *(f"    {text}" for text in _counted(texts))]
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Write the masks as JSON, which `stof_tvm.masks.load` reads.

        Raises MaskError for a mask that has no text (of a tensor or a function) and for a rule of one's own, and
        OSError where the file cannot be written.
        """
        texts = {name: [_written(entry) for entry in _heads(mask)] for name, mask in self.items()}
        content = {"format": FORMAT, "density": self.density, "loss": self.loss, "masks": texts}
        write_whole(as_path(path), json.dumps(content, indent=1) + "\n")


def load(path: str | os.PathLike) -> Assignment:
    """The masks of a file that `Assignment.save` wrote.

    `path` is its name.  Raises InputError where there is no such file, and MaskError for a file that holds something
    else.
    """
    file = as_path(path)
    try:
        content = read_json(file.read_bytes())
    except OSError as error:
        raise InputError(f"the masks {file} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise MaskError(f"{file} holds no masks: {error}") from None
    try:
        return _assignment(content)
    except MaskError as error:
        raise MaskError(f"{file}: {error}") from None


def _assignment(content) -> Assignment:
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise MaskError(f"it holds no masks of the format {FORMAT!r}")
    unknown = content.keys() - {"format", "density", "loss", "masks"}
    texts = content.get("masks")
    if unknown or not isinstance(texts, dict) or not texts:
        raise MaskError(f"it has {reprlib.repr(sorted(unknown)) if unknown else 'no masks'}")
    numbers = {}
    for name, most in (("density", 1), ("loss", float("inf"))):
        number = content.get(name)
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | float)):
            raise MaskError(f"{name}={reprlib.repr(number)} must be a number")
        if number is not None and not 0 <= number <= most:
            raise MaskError(f"{name}={number} must be at least 0" + (" and at most 1" if most == 1 else ""))
        numbers[name] = number
    masks = {}
    for path, heads in texts.items():
        if not isinstance(heads, list) or not heads or not all(map(_is_text, heads)):
            raise MaskError(
                f"the masks of {reprlib.repr(path)} must be a list of texts, one for each head or one for all; "
                f"the text of a rule is written {{{RULE!r}: text}}"
            )
        masks[path] = of_heads([_read(text) for text in heads])
    return Assignment(masks, **numbers)


def of_heads(entries: list[Mask | Rule]) -> Mask | Rule:
    """What keeps in each head what its entry keeps; one entry is for all heads."""
    if len(entries) == 1:
        return entries[0]
    return (runtime.per_head if any(isinstance(entry, Rule) for entry in entries) else per_head)(entries)


def _heads(mask: Mask | Rule) -> list[Mask | Rule]:
    """The entries of `per_head`, one for each head; any other mask or rule alone."""
    if isinstance(mask, Rule):
        return list(mask.function.entries) if isinstance(mask.function, OfHeads) and not mask.bounds else [mask]
    return list(mask.entries[0]) if isinstance(mask, Grid) and len(mask.entries) == 1 else [mask]


def _is_text(entry) -> bool:
    """Whether an entry of a file is the text of a mask or of a rule."""
    return isinstance(entry, str) or (
        isinstance(entry, dict) and entry.keys() == {RULE} and isinstance(entry[RULE], str)
    )


def _written(entry: Mask | Rule) -> str | dict[str, str]:
    return {RULE: rule_text(entry)} if isinstance(entry, Rule) else mask_text(entry)


def _read(text: str | dict[str, str]) -> Mask | Rule:
    if isinstance(text, dict):
        return parse_rule(text[RULE])
    try:
        return parse_mask(text)
    except RuleGivenError as error:
        raise MaskError(f"{error}: write {json.dumps({RULE: text[:SHOWN]})}") from None


def _counted(texts: list[str]) -> list[str]:
    """Each text once, with the heads that have it."""
    heads: dict[str, list[int]] = {}
    for h, text in enumerate(texts):
        heads.setdefault(text, []).append(h)
    if len(heads) == 1:
        return list(heads)
    return [f"{text}: heads {', '.join(map(str, numbers))}" for text, numbers in heads.items()]
