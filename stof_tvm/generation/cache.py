"""A cache of transformers whose keys and values lie in the buffers of a module that is exported."""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class BufferLayer(CacheLayerMixin):
    """One layer's keys and values, slot i those of position i, whatever window the layer's mask has.

    Parameters
    ----------
    keys, values : torch.Tensor
        (batch, heads, length, size): what a call writes its new keys and values into.
    positions : torch.Tensor or None
        int64 (batch,): the position of each sequence's one new token; None for a prompt, whose tokens begin at 0.
    first : torch.Tensor
        int64 (1,): which sequence's is the first prompt, where there are fewer than sequences; else it is not read.
    last : torch.Tensor
        int64 (1,): where prompts of which not all is kept have their last token.
    kept : int or None
        How many of a prompt's last keys and values are kept; None for all.
    """

    is_sliding = False
    is_compileable = True
    is_croppable = False

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor | None,
        first: torch.Tensor,
        last: torch.Tensor,
        kept: int | None = None,
    ):
        super().__init__()
        self.keys, self.values, self.positions = keys, values, positions
        self.first, self.last, self.kept = first, last, kept
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        """Nothing is left to do."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Write new keys and values.  Returns those that the new queries may attend to."""
        if self.positions is None:
            for buffer, new in ((self.keys, key_states), (self.values, value_states)):
                self._write_prompts(buffer, new)
            return key_states, value_states  # nothing was there before
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            if len(self.positions) == 1:
                buffer.index_copy_(2, self.positions, new)
            else:
                batch, heads, length, size = buffer.shape
                first = torch.arange(batch * heads, device=buffer.device) * length
                slots = first + self.positions[:, None].expand(batch, heads).reshape(-1)
                buffer.view(-1, size).index_copy_(0, slots, new.reshape(-1, size))
        return self.keys, self.values

    def _write_prompts(self, buffer: torch.Tensor, new: torch.Tensor) -> None:
        count, heads, tokens, size = new.shape
        is_part, length = count < len(buffer), buffer.shape[2]
        if self.kept is None:
            places, base = torch.arange(tokens, device=buffer.device), self.first * (heads * length)
        else:
            places = torch.arange(1 - self.kept, 1, device=buffer.device)
            rows = self.last + places
            new, base = new.index_select(2, rows), self.first * (heads * length) + self.last
        if is_part:
            buffer.view(-1, size).index_copy_(0, slots(base, count, heads, length, places), new.reshape(-1, size))
        elif self.kept is None:
            buffer[:, :, :tokens] = new
        else:
            buffer.index_copy_(2, rows, new)

    def get_seq_length(self):
        """The position of the first new token: 0, or int64 (batch,)."""
        return 0 if self.positions is None else self.positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a query may attend to, position of the first)."""
        return (query_length if self.positions is None else self.keys.shape[2]), 0

    def get_max_length(self) -> int:
        """The number of slots."""
        return self.keys.shape[2]


def slots(base: torch.Tensor, count: int, heads: int, length: int, places: torch.Tensor) -> torch.Tensor:
    """Rows int64 (count * heads * tokens,) of a buffer (batch * heads * length, size), in the order of its dimensions.

    It is one number of run time plus constants: so the compiler sees that no two are the same (docs/states.md).

    Parameters
    ----------
    base : torch.Tensor
        int64 (1,): the row that places of the first of `count` sequences, and of its first head, are counted from.
    count, heads, length : int
    places : torch.Tensor
        int64 (tokens,): the same of all sequences and heads.
    """
    starts = torch.arange(count * heads, device=places.device) * length
    return (starts[:, None] + places).view(-1) + base


def buffer_cache(
    buffers: list[tuple[torch.Tensor, torch.Tensor]],
    positions: torch.Tensor | None,
    first: torch.Tensor,
    last: torch.Tensor,
    kept: list[int | None],
) -> Cache:
    """The cache of all layers; arguments are those of `BufferLayer`, `kept` of each layer."""
    pairs = zip(buffers, kept, strict=True)
    return Cache(layers=[BufferLayer(keys, values, positions, first, last, n) for (keys, values), n in pairs])
