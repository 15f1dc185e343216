"""One pass over received and own keys: every pair once, columns in the order of tokens, and when it is taken."""

import numpy as np
import pytest
import torch

from stof_tvm import masks
from stof_tvm.parallel import context_plan
from stof_tvm.parallel.context import joined as joining
from stof_tvm.parallel.context.exchange import Exchange
from stof_tvm.parallel.context.joined import joined
from stof_tvm.parallel.context.parts import Parts
from tests.stof_tvm.parallel.context.some_masks import HEADS, some_masks

LENGTH = 640
MASKS = some_masks(LENGTH) | {"sinks in documents": masks.document([350, 290], inside=masks.a_shape(4, 20))}


def of_rank(mask, rank: int, length=LENGTH, ranks=2, q_heads=HEADS, kv_heads=1):
    """(plan, exchange, what joins a rank's columns)."""
    plan = context_plan(mask, length, ranks)
    exchange = Exchange(plan, rank, 1, kv_heads)
    return plan, exchange, joined(plan, rank, q_heads, exchange, Parts(plan, rank, q_heads, exchange.where))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", MASKS)
def test_every_pair_is_kept_once(name, ranks, monkeypatch):
    monkeypatch.setattr(joining, "_pays", lambda *_: True)
    dense = MASKS[name].dense(LENGTH).numpy().reshape(-1, LENGTH, LENGTH)
    whole = torch.arange(1, LENGTH + 1).reshape(1, 1, LENGTH, 1)
    for rank in range(ranks):
        plan, exchange, found = of_rank(MASKS[name], rank, ranks=ranks)
        if found is None:
            continue
        mine, width = plan.positions(rank), found.mask.width
        assert (np.diff(found.mask.columns[0][0].tokens) >= 0).all()
        kept = found.mask.dense(len(mine), width).numpy().reshape(-1, len(mine), width)
        own = plan.shard(whole, rank)
        received = exchange.laid(_received(exchange, plan, rank, whole))
        tokens = found.complete(found.keys(own), received)[0, 0, :, 0].numpy() - 1
        assert tokens[found.own : found.own + len(mine)].tolist() == mine.tolist()
        assert found.own % 128 == 0
        again = np.zeros((len(kept), len(mine), LENGTH), int)
        counted = tokens >= 0  # places that nothing is received for are 0
        np.add.at(again, (slice(None), slice(None), tokens[counted]), kept[:, :, counted])
        assert not kept[:, :, ~counted].any()
        assert (again == dense[:, mine]).all()


def _received(exchange: Exchange, plan, rank: int, whole: torch.Tensor) -> torch.Tensor:
    """The rows that arrive at a rank, in the order of those that send them."""
    others = [Exchange(plan, other, 1, 1) for other in range(plan.ranks)]
    rows = []
    for other, each in enumerate(others):
        part = plan.shard(whole, other).reshape(-1, 1)
        rows.append(part.index_select(0, each._sources(True, 0, part.device)).split(each.sent)[rank])
    return torch.cat(rows)


def test_some_ranks_of_these_masks_have_their_columns_in_order(monkeypatch):
    monkeypatch.setattr(joining, "_pays", lambda *_: True)
    found = {name: [of_rank(mask, rank)[2] is not None for rank in range(2)] for name, mask in MASKS.items()}
    assert any(found["window and sinks"]) and any(found["bigbird"])
    by_head = [of_rank(MASKS["by head"], rank, kv_heads=HEADS)[2] for rank in range(2)]
    assert by_head == [None, None]  # heads receive other tokens


def test_it_is_taken_where_most_rows_keep_a_few_received_keys():
    """A window of 1,024 tokens with sinks, at 16,384: query heads that share key heads pass over their rows once."""
    sinks, window = masks.a_shape(64, 1024), masks.sliding_window(512)
    sizes = {"length": 16384, "ranks": 2}
    assert of_rank(sinks, 1, **sizes, q_heads=32, kv_heads=8)[2] is not None
    assert of_rank(sinks, 1, **sizes, q_heads=8, kv_heads=8)[2] is None  # keys are as many as queries
    assert of_rank(sinks, 0, **sizes, q_heads=32, kv_heads=8)[2] is None  # nothing is received
    assert of_rank(window, 1, **sizes, q_heads=32, kv_heads=8)[2] is None  # by few rows
    assert of_rank(masks.causal(), 1, **sizes, q_heads=32, kv_heads=8)[2] is None  # too much to wait for
