"""A rank's attention in one pass over received and own keys, where that takes less time than two.

Rows are computed with the rank's own keys while those of others arrive, and those with received keys once more: their
queries, results and log-sum-exp are read again, and results written again.  Where most rows keep a few received keys,
such as the first tokens of a text, and a key head serves several query heads, it takes less time to wait for the keys
and to copy all of them into one tensor, in the order of their tokens.
"""

from typing import NamedTuple

import numpy as np
import torch

from stof_tvm.parallel.context.exchange import Exchange
from stof_tvm.parallel.context.gathered import Columns, Gathered
from stof_tvm.parallel.context.parts import Parts
from stof_tvm.parallel.context.plan import ContextPlan

LINK = 11  # a byte that comes from another GPU takes as long as so many in memory (NVLink of an H200)
READ_AGAIN = 3  # q, the result, and the result that is written
COPIED = 4  # k and v, each read and written
TOGETHER = 128  # keys of a kernel's widest block


class Joined(NamedTuple):
    """All columns of a rank: received ones up to place `before`, its own, and received ones from place `after` on.

    The rank's own begin at column `own`; those before them that nothing is received for are zeros.
    """

    before: int
    after: int
    own: int
    mask: Gathered

    def keys(self, own: torch.Tensor) -> torch.Tensor:
        """A tensor (batch, kv_heads, columns, dim) with the rank's own k or v in it; `complete` adds what arrives."""
        batch, heads, tokens, dim = own.shape
        keys = own.new_empty(batch, heads, self.mask.width, dim)
        keys[:, :, self.before : self.own].zero_()
        keys[:, :, self.own : self.own + tokens].copy_(own)
        return keys

    def complete(self, keys: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """The same tensor with received k or v (batch, kv_heads, places, dim)."""
        first, last = received[:, :, : self.before], received[:, :, self.after :]
        keys[:, :, : self.before].copy_(first)
        keys[:, :, keys.shape[2] - last.shape[2] :].copy_(last)
        return keys


def joined(plan: ContextPlan, rank: int, q_heads: int, exchange: Exchange, parts: Parts) -> Joined | None:
    """The columns in one, or None where two passes take less time or tokens would not be in order."""
    rows = sum(run.end - run.first for run in parts.runs)
    if parts.own is None or not _pays(rows, q_heads, exchange):
        return None
    columns = exchange.where.columns
    if len(columns) > 1 or len(columns[0]) > 1 or len(columns[0][0].tokens) != exchange.places:
        return None  # key heads receive different tokens
    received, mine = columns[0][0], plan.positions(rank)
    before = int(np.searchsorted(received.tokens, mine[0]))
    after = int(np.searchsorted(received.tokens, mine[-1], "right"))
    if received.counts[before:after].any():
        return None  # received tokens lie among the rank's own
    # Rows and columns of the mask's blocks meet as they do in the whole sequence.
    fill = -before % TOGETHER if before else 0
    next_token = received.tokens[before - 1] + 1 if before else 0
    filled = np.minimum(next_token + np.arange(fill), mine[0])  # in order, as masks are asked
    tokens = np.concatenate([received.tokens[:before], filled, mine, received.tokens[after:]])
    counts = received.counts[:before], np.zeros(fill, np.bool_), np.ones(len(mine), np.bool_), received.counts[after:]
    mask = Gathered(plan.mask, plan.length, mine, [[Columns(tokens, np.concatenate(counts))]], len(tokens))
    return Joined(before, after, before + fill, mask)


def _pays(rows: int, q_heads: int, exchange: Exchange) -> bool:
    """Whether one pass takes less time, where `rows` of the rank's rows keep received keys."""
    again = READ_AGAIN * exchange.batch * q_heads * rows
    copied = COPIED * exchange.batch * exchange.kv_heads * (exchange.tokens + exchange.places)
    return copied + LINK * 2 * sum(exchange.received) < again
