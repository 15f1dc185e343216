"""Where the sequences of a padded batch are, and where they go on a row of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from stof_tvm.frontend.packing.rewriter import ENDS, FIRST, NUMBER, PLACE, STARTS
from stof_tvm.masks import Mask, document
from stof_tvm.masks.arguments import check_ints
from tir_kernels.errors import InputError, MaskError

STEP = 64  # rows of tokens are multiples of it
GROWTH = 0.12  # the most that a row is longer than the one before, unless by one STEP
FEWEST_SEQUENCES = 8


def row_length(tokens: int) -> int:
    """The length of the shortest row that has room for `tokens` tokens."""
    length = STEP
    while length < tokens:
        length += max(STEP, int(length * GROWTH) // STEP * STEP)
    return length


def most_sequences(sequences: int) -> int:
    """How many sequences a program takes that takes `sequences` and one more for the rest of the row."""
    return max(FEWEST_SEQUENCES, 1 << sequences.bit_length())


@dataclass(frozen=True)
class Layout:
    """The sequences of a batch of `batch` rows and `width` places.

    Attributes
    ----------
    lengths : tuple of int
        Of each row's sequence, at least 1.
    offsets : tuple of int
        The place of its first token: 0 where padding follows, more where padding comes first.
    """

    batch: int
    width: int
    lengths: tuple[int, ...]
    offsets: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """How many real tokens there are."""
        return sum(self.lengths)

    def mask(self, row: int, inside: Mask | None) -> Mask:
        """The mask of a row of tokens: each sequence is a document, masked by `inside`; so is the rest of the row."""
        return document(self.lengths, inside, row - self.tokens)

    def places(self) -> np.ndarray:
        """int64 (tokens,): the number of each token among the batch's batch · width places."""
        rows = enumerate(zip(self.lengths, self.offsets, strict=True))
        return np.concatenate([number * self.width + offset + np.arange(length) for number, (length, offset) in rows])

    def documents(self) -> np.ndarray:
        """int32 (sequences + 1, 2): what the kernel `tokens` reads of the sequences, documents on a row."""
        starts = np.cumsum((0, *self.lengths))
        places = np.arange(self.batch) * self.width + self.offsets
        return np.stack([starts, [*places, 0]], axis=1).astype(np.int32)

    def vectors(self, row: int, sequences: int) -> Mapping[str, np.ndarray]:
        """The int64 inputs of a packed program (rewriter.py).

        What is left of the row repeats its last token.  There each token counts as the first of a sequence, for its
        position must be one that the model has: a place outside of a table gives NaN, which would reach its neighbours.
        """
        rest = row - self.tokens
        lengths = np.array((*self.lengths, rest) if rest else self.lengths)
        starts = np.cumsum(lengths) - lengths
        first = np.repeat(starts, lengths)
        first[self.tokens :] = np.arange(self.tokens, row)
        ends = starts + lengths - 1
        more = (0, max(0, sequences - len(lengths)))
        return {
            PLACE: np.arange(row) - first,
            NUMBER: np.repeat(np.arange(len(lengths)), lengths),
            FIRST: first,
            STARTS: np.pad(starts, more, mode="edge")[:sequences],
            ENDS: np.pad(ends, more, mode="edge")[:sequences],
        }


def layout_of_lengths(lengths, batch: int, width: int) -> Layout:
    """The layout of sequences that begin at their rows' first places; InputError for lengths that do not fit."""
    try:
        lengths = check_ints("lengths", lengths, least=1)
    except MaskError as error:
        raise InputError(str(error)) from None
    if len(lengths) != batch:
        raise InputError(f"lengths has {len(lengths)} entries for a batch of {batch}")
    if max(lengths) > width:
        raise InputError(f"a length of {max(lengths)} exceeds the batch's {width} places")
    return Layout(batch, width, lengths, (0,) * batch)


def layout_of_mask(mask: torch.Tensor, name: str, real) -> Layout:
    """The layout that a padding mask (batch, width) tells; reading it waits for the GPU that it is on.

    Raises InputError for values other than 0 and 1, a row without tokens, and padding between tokens.
    """
    values = mask.detach().cpu()
    found = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    is_real = found == np.asarray(real, found.dtype)
    if not (is_real | (found == np.asarray(1 - real, found.dtype))).all():
        raise InputError(f"{name} holds other values than 0 and 1")
    lengths, offsets = is_real.sum(1), is_real.argmax(1)
    ends = is_real.shape[1] - is_real[:, ::-1].argmax(1)
    for row in np.flatnonzero(lengths == 0):
        raise InputError(f"{name} calls all of row {row} padding: a sequence has at least one token")
    for row in np.flatnonzero(ends - offsets != lengths):
        raise InputError(f"{name} has padding between the tokens of row {row}: sequences must be in one piece")
    batch, width = is_real.shape
    return Layout(batch, width, tuple(map(int, lengths)), tuple(map(int, offsets)))
