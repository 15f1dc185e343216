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
    written : torch.Tensor or None
        int64 (count,): the positions of a prompt whose keys and values are kept; None for all.
    """

    is_sliding = False
    is_compileable = True
    is_croppable = False

    def __init__(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        positions: torch.Tensor | None,
        written: torch.Tensor | None = None,
    ):
        super().__init__()
        self.keys, self.values, self.positions, self.written = keys, values, positions, written
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        """Nothing is left to do."""

    def update(self, key_states, value_states, *args, **kwargs):
        """Write new keys and values.  Returns those that the new queries may attend to."""
        if self.positions is None:
            length = key_states.shape[2]
            for buffer, new in ((self.keys, key_states), (self.values, value_states)):
                if self.written is None:
                    buffer[:, :, :length] = new
                else:
                    buffer.index_copy_(2, self.written, new.index_select(2, self.written))
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

    def get_seq_length(self):
        """The position of the first new token: 0, or int64 (batch,)."""
        return 0 if self.positions is None else self.positions

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(number of keys that a query may attend to, position of the first)."""
        return (query_length if self.positions is None else self.keys.shape[2]), 0

    def get_max_length(self) -> int:
        """The number of slots."""
        return self.keys.shape[2]


def buffer_cache(
    buffers: list[tuple[torch.Tensor, torch.Tensor]],
    positions: torch.Tensor | None,
    written: list[torch.Tensor | None],
) -> Cache:
    """The cache of all layers; arguments are those of `BufferLayer`, for each layer its own `written`."""
    pairs = zip(buffers, written, strict=True)
    return Cache(layers=[BufferLayer(keys, values, positions, rows) for (keys, values), rows in pairs])
