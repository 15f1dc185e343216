"""Masks by module path, as a value that `build` takes and a file that it reads."""

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from stof_tvm.masks.mask import Grid, Mask, per_head
from stof_tvm.masks.text import mask_text, parse_mask
from stof_tvm.saving.strict_json import read_json
from stof_tvm.saving.whole_file import as_path, write_whole
from tir_kernels.errors import InputError, MaskError

FORMAT = "stof_tvm masks 1"


class Assignment(Mapping[str, Mask]):
    """A mask for each of some module paths or patterns, in the order given: where several match, the last one counts.

    It is a mapping, so it may be given wherever masks by path are: `build(…, mask=assignment)`.  Files keep the order.

    Attributes
    ----------
    density : float or None
        Pairs that the masks keep, over those that the model's own masks keep, if it is known.
    loss : float or None
        The sum of the losses by which the masks were chosen, if they were.
    """

    def __init__(self, masks: Mapping[str, Mask], density: float | None = None, loss: float | None = None):
        """MaskError for keys that are no paths and values that are no masks."""
        for path, mask in masks.items():
            if not isinstance(path, str) or not isinstance(mask, Mask):
                raise MaskError(f"masks go by paths, got {reprlib.repr(path)}: {type(mask).__name__}")
        self._masks = dict(masks)
        self.density, self.loss = density, loss

    def __getitem__(self, path: str) -> Mask:
        """The mask of a path; KeyError where there is none."""
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

        Raises MaskError for a mask that has no text (of a tensor or a function), and OSError where the file cannot be
        written.
        """
        texts = {name: [mask_text(entry) for entry in _heads(mask)] for name, mask in self.items()}
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
        if not isinstance(heads, list) or not heads or not all(isinstance(text, str) for text in heads):
            raise MaskError(
                f"the masks of {reprlib.repr(path)} must be a list of texts, one for each head or one for all"
            )
        entries = [parse_mask(text) for text in heads]
        masks[path] = entries[0] if len(entries) == 1 else per_head(entries)
    return Assignment(masks, **numbers)


def _heads(mask: Mask) -> list[Mask]:
    """The masks of `per_head`, one for each head; any other mask alone."""
    return list(mask.entries[0]) if isinstance(mask, Grid) and len(mask.entries) == 1 else [mask]


def _counted(texts: list[str]) -> list[str]:
    """Each text once, with the heads that have it."""
    heads: dict[str, list[int]] = {}
    for h, text in enumerate(texts):
        heads.setdefault(text, []).append(h)
    if len(heads) == 1:
        return list(heads)
    return [f"{text}: heads {', '.join(map(str, numbers))}" for text, numbers in heads.items()]
