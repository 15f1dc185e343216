"""A causal language model with its cache in buffers: one forward for a prompt, another for the next token."""

import contextlib
import math
from collections.abc import Sequence
from contextvars import ContextVar

import torch
from torch import nn
from transformers import PreTrainedModel

from stof_tvm.generation.buckets import least_length
from stof_tvm.generation.cache import buffer_cache
from stof_tvm.generation.positions import at_positions

MOST_NOISE = 1 << 24  # numbers of which each is another one: a CPU makes some hundred million in a second
PERIOD = 1_000_003  # a prime: tokens and heads of a long cache differ


class Decoder(nn.Module):
    """A model and the keys and values of the tokens that it has seen, slot i those of position i.

    Each sequence begins at position 0, so the masks of a prompt are constants.  What stands behind a prompt's last
    token is padding: its keys come into slots that no earlier token attends to, and that the next tokens overwrite.

    Parameters
    ----------
    model : PreTrainedModel
    shapes : list of (Size, Size)
        For each layer, shapes (batch, heads, max_length, size) of its keys and its values.
    dtype : torch.dtype
        Of keys and values.
    one_position : bool
        Whether all sequences are at one position; else each is at its own.
    windows : sequence of (int or None), optional
        For each layer, how many of the last tokens any later token attends to, itself included; None for all.
    buckets : sequence of int, optional
        The lengths that prompts are padded to, in order: a prompt is longer than the one before its own.
    """

    holds_cache = True  # an export leaves the model's use of a cache as it is
    paths_within = "model"  # whose paths messages, reports and masks have
    model: PreTrainedModel
    positions: torch.Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: list[tuple],
        dtype: torch.dtype,
        one_position: bool,
        windows: Sequence[int | None] = (),
        buckets: Sequence[int] = (),
    ):
        super().__init__()
        self.model = model
        self.layers, self.one_position = len(shapes), one_position
        self.windows, self.buckets = tuple(windows) or (None,) * len(shapes), tuple(buckets)
        self.batch, _, length, _ = shapes[0][0]
        # As in the middle of a text: so the first comparison of a step with PyTorch is of one that attends to others.
        numbers = torch.Generator().manual_seed(0)
        for n, pair in enumerate(shapes):
            for name, shape in zip(("keys", "values"), pair):
                self.register_buffer(f"{name}_{n}", _noise(shape, dtype, model.device, numbers))
        positions = torch.full((1 if one_position else self.batch,), length // 2, device=model.device)
        self.register_buffer("positions", positions)

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Logits (batch or part, vocabulary) of the token after each sequence's last one.

        Parameters
        ----------
        ids : torch.Tensor
            int64 (batch, tokens): prompts from position 0 on, or one token at each sequence's next position; or int64
            (part, tokens), prompts of some sequences.
        lengths : torch.Tensor
            int64 (batch or part,): how many of a prompt's tokens count, the first ones; of a single token it is not
            read.
        first : torch.Tensor
            int64 (1,): the first of a part's sequences, which follow one another; of all sequences it is not read.
        """
        is_step = ids.shape[1] == 1
        positions = self.positions.clone() if is_step else None
        last, kept = self._last_rows(ids.shape[1], lengths)
        buffers = [(getattr(self, f"keys_{n}"), getattr(self, f"values_{n}")) for n in range(self.layers)]
        cache = buffer_cache(buffers, positions, first, last, kept)
        if positions is None:
            position_ids = torch.arange(ids.shape[1], device=ids.device)[None]
        else:
            position_ids = positions[:, None]
        head = self.model.get_output_embeddings()
        with at_positions(self.model), contextlib.nullcontext() if is_step else _only(head, last):
            logits = self.model(
                ids, position_ids=position_ids, past_key_values=cache, use_cache=True, return_dict=True
            ).logits
        if is_step:
            self.positions.add_(1)
        elif len(ids) == self.batch or self.one_position:
            self.positions.copy_(lengths[: len(self.positions)])
        else:
            self.positions.index_copy_(0, first + torch.arange(len(ids), device=ids.device), lengths)
        return logits[:, -1]

    def release(self) -> None:
        """Give back the memory of keys and values: no more is computed here, as where a copy is compiled."""
        for n in range(self.layers):
            for name in (f"keys_{n}", f"values_{n}"):
                setattr(self, name, getattr(self, name).new_empty(0))

    def _last_rows(self, room: int, lengths: torch.Tensor) -> tuple[torch.Tensor, list[int | None]]:
        """(each prompt's last row, int64 (batch, 1), or that of all (1,); how many rows each layer's cache keeps).

        Of a prompt that is known to be long, only what later tokens attend to is kept, so that nothing else need be
        computed for it.  Which rows these are is said by one number between two known ones.
        """
        least = least_length(room, self.buckets)
        kept = [None if n is None or n > least else n for n in self.windows]
        if room == 1 or not self.one_position or not any(kept):
            return lengths[:, None] - 1, [None] * self.layers
        return (lengths[:1] - 1).clamp(least - 1, room - 1), kept


def _noise(shape: Sequence[int], dtype: torch.dtype, device, numbers: torch.Generator) -> torch.Tensor:
    """Random numbers; many of them are PERIOD ones again and again, the same for each entry of the first axis."""
    count = math.prod(shape)
    if count <= MOST_NOISE:
        return torch.empty(shape, dtype=dtype).normal_(generator=numbers).to(device)
    period = torch.empty(PERIOD, dtype=dtype).normal_(generator=numbers).to(device)
    entry = math.prod(shape[1:])
    return period.repeat(-(-entry // PERIOD))[:entry].view(1, *shape[1:]).repeat(shape[0], *(1 for _ in shape[1:]))


_rows: ContextVar[torch.Tensor | None] = ContextVar("rows", default=None)


@contextlib.contextmanager
def _only(head: nn.Module, rows: torch.Tensor):
    """Let a model's last product take one row of each sequence: logits of the others would be computed for nothing.

    `rows` is int64 (batch, 1), or (1,) for the same row of all.

    Calls of the model in other threads have logits of all rows.
    """

    def take(_head, inputs):
        if _rows.get() is not rows:
            return inputs
        (hidden,) = inputs
        if rows.dim() == 1:
            return hidden.index_select(1, rows)
        return hidden.gather(1, rows[..., None].expand(-1, 1, hidden.shape[-1]))

    handle, token = head.register_forward_pre_hook(take), _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)
        handle.remove()
