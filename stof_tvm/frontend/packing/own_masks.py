"""The masks of a model, by what they are for a sequence alone: masks of positions inside the sequence.

A model makes its masks from the padding mask and from positions.  The rules of this folder follow them, so each element
of a mask depends on the positions i and j and on the padding mask at i and j, and on nothing else.  Its values for one
sequence of the longest length then say what it is for every sequence.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.fx import Node
from torch.fx.node import map_arg

from stof_tvm import masks
from stof_tvm.masks.arguments import FixedArray
from stof_tvm.masks.mask import Leaf
from stof_tvm.masks.pattern import Layout
from tir_kernels.errors import MaskError

IGNORED = -1e4  # a model that adds this to scores of padding means to mask them


def lowest(dtype: torch.dtype | None) -> float:
    """Scores of a dtype that are as low as this are masked."""
    return -32752.0 if dtype == torch.float16 else -1e30


class NotAMask(Exception):
    """What is added to scores is more than a mask; `mask` is what its lowest numbers mask."""

    def __init__(self, mask: masks.Mask | None):
        super().__init__()
        self.mask = mask


class OwnMasks:
    """Evaluates parts of a program for one sequence.

    Parameters
    ----------
    tensors : dict
        Parameters, buffers and constants by the names of their placeholders.
    inputs : dict
        The inputs of a sequence of the longest length, batch 1, by the names of their placeholders; their values are
        not used.
    padding : str
        The padding mask among them, "" where the model has none.
    real : bool or number
        What the padding mask is at a token.
    """

    def __init__(self, tensors: Mapping, inputs: Mapping[str, torch.Tensor], padding: str, real):
        self.padding = padding
        self.longest = next(iter(inputs.values())).shape[1]
        self._known: dict[bool, dict[Any, Any]] = {}
        for is_padded in (False, True):
            values: dict[Any, Any] = {**tensors, **inputs}
            if padding:
                dtype = inputs[padding].dtype
                whole = torch.full_like(inputs[padding], real)
                holes = torch.arange(whole.shape[1], device=whole.device) % 2 == 1
                values[padding] = torch.where(holes, torch.full_like(whole, 1 - real), whole) if is_padded else whole
                values[padding] = values[padding].to(dtype)
            self._known[is_padded] = values  # by names here; nodes join them
        self._masks: dict[tuple[Node, bool | None], Any] = {}

    def value(self, node: Node, is_padded: bool = False):
        """What a node is for the sequence alone, or with every second token of it called padding."""
        known = self._known[is_padded]
        if node.op == "placeholder":
            return known[node.name]
        pending = [node]
        while pending:
            current = pending[-1]
            missing = [x for x in current.all_input_nodes if x.op != "placeholder" and x not in known]
            if missing:
                pending += missing
                continue
            pending.pop()
            if current not in known:
                args, kwargs = map_arg(
                    (current.args, current.kwargs), lambda x: known[x.name if x.op == "placeholder" else x]
                )
                with torch.no_grad():
                    known[current] = current.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]

    def only_value(self, node: Node) -> bool | None:
        """The value that a boolean has everywhere, for a sequence alone; None if it has both."""
        if (node, None) not in self._masks:
            value = self.value(node)
            self._masks[node, None] = True if bool(value.all()) else None if bool(value.any()) else False
        return self._masks[node, None]

    def of_scores(self, node: Node, is_kept: bool = True) -> masks.Mask | None:
        """The mask that a boolean (True is `is_kept`) or an added node is; None if it masks nothing but padding.

        Raises NotAMask for numbers that only shift scores, ValueError where the padding mask does not mask keys.
        """
        key = node, is_kept
        if key not in self._masks:
            try:
                self._masks[key] = self._of_scores(node, is_kept)
            except NotAMask as more:
                self._masks[key] = more
        known = self._masks[key]
        if isinstance(known, NotAMask):
            raise known
        return known

    def check_padding(self, node: Node, is_kept: bool = True) -> None:
        """ValueError unless a mask that depends on the padding mask drops what that calls padding."""
        if self.padding:
            padded = self.value(node, is_padded=True)
            ignored = padded == (not is_kept) if padded.dtype == torch.bool else padded <= IGNORED
            keys = ignored.expand(*ignored.shape[:-1], self.longest)[..., 1::2]
            if not bool(keys.all()):
                raise ValueError(f"it does not mask the keys that {self.padding} calls padding")

    def _of_scores(self, node: Node, is_kept: bool) -> masks.Mask | None:
        alone = self.value(node)
        if alone.dtype == torch.bool:
            return self._named(alone, alone if is_kept else ~alone)
        keep = alone > lowest(alone.dtype)
        mask = self._named(alone, keep)
        if bool((keep & (alone != 0)).any()):
            raise NotAMask(mask)
        return mask

    def _named(self, alone: torch.Tensor, keep: torch.Tensor) -> masks.Mask | None:
        if bool(keep.all()):
            return None
        if not bool(keep.any()):
            raise ValueError("it keeps nothing of a sequence without padding: is True what it masks?")
        keep = keep.expand(*keep.shape[:-2], self.longest, self.longest)
        if keep.dim() > 4 or (keep.dim() == 4 and keep.shape[0] != 1):
            raise ValueError(f"it is a mask of shape {tuple(alone.shape)} for one sequence")
        keep = keep[0] if keep.dim() == 4 else keep
        if keep.dim() == 3 and keep.shape[0] > 1:
            return masks.per_head([_named(part) for part in keep])
        return _named(keep[0] if keep.dim() == 3 else keep)


def _named(keep: torch.Tensor) -> masks.Mask:
    """A mask of positions, by its name if it is causal or a window."""
    length = keep.shape[-1]
    row, column = keep[0], keep[:, 0]
    if torch.equal(keep[1:, 1:], keep[:-1, :-1]):
        after, before = _run(row), _run(column)  # how many keys after the query, and before it, are kept
        if after is not None and before is not None:
            if after == length - 1 == before:
                return masks.sliding_window(length)
            if after == 0:
                return masks.causal() if before == length - 1 else masks.sliding_window(before, causal=True)
            if after == before:
                return masks.sliding_window(after)
    return _table(FixedArray(keep.cpu().numpy()))


def _run(kept: torch.Tensor) -> int | None:
    """The last of the first positions that are all kept, None where others follow or there is none."""
    count = int(kept.sum())
    return count - 1 if count and bool(kept[:count].all()) else None


def _table(table: FixedArray) -> Leaf:
    """The mask of the first positions of a table, which has a row for each position up to the longest."""

    def bind(q_len, kv_len):
        if max(q_len, kv_len) > len(table.array):
            raise MaskError(f"the model's mask of {len(table.array)} positions has none at {max(q_len, kv_len)}")
        return Layout(np.ascontiguousarray(table.array[:q_len, :kv_len]), 1, 1)

    return Leaf(_table, {"table": table.key}, bind)
