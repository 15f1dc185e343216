"""The parts of all ranks' attentions keep what the mask keeps, each pair once; rows are laid where they say."""

import numpy as np
import pytest
import torch

from stof_tvm.parallel import context_plan
from stof_tvm.parallel.context.exchange import Exchange, Places
from stof_tvm.parallel.context.parts import GAP, Parts, runs
from tests.stof_tvm.parallel.context.some_masks import HEADS, some_masks

LENGTH, RANKS, KV_HEADS = 459, 3, 2
MASKS = some_masks(LENGTH)


@pytest.mark.parametrize("name", MASKS)
def test_parts_keep_every_pair_once(name):
    plan, dense = context_plan(MASKS[name], LENGTH, RANKS), MASKS[name].dense(LENGTH).numpy()
    dense = np.broadcast_to(dense.reshape(-1, LENGTH, LENGTH), (HEADS, LENGTH, LENGTH))
    for rank in range(RANKS):
        laid, mine = Places(plan, rank, KV_HEADS), plan.positions(rank)
        parts, found = Parts(plan, rank, HEADS, laid), np.zeros((HEADS, LENGTH, LENGTH), int)
        if parts.own is not None:
            found[:, mine[:, None], mine] += parts.own.dense(len(mine)).numpy().reshape(-1, len(mine), len(mine))
        for first, end, mask in parts.runs:
            kept = mask.dense(end - first, laid.count).numpy().reshape(-1, end - first, laid.count)
            kept = np.broadcast_to(kept, (HEADS, end - first, laid.count))
            for head in range(HEADS):
                row = laid.columns[0]
                columns = row[head // (HEADS // KV_HEADS) if len(row) > 1 else 0]
                assert not kept[head][:, len(columns.tokens) :].any()
                found[head][np.ix_(mine[first:end], columns.tokens)] += kept[head][:, : len(columns.tokens)]
        expected = np.zeros_like(found)
        expected[:, mine] = dense[:, mine]
        assert (found == expected).all()


@pytest.mark.parametrize("tags", [0, 2])
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("name", ["by head", "bigbird", "causal documents"])
def test_what_ranks_send_is_what_others_lay(name, in_order, tags):
    """Without processes: rows of every rank, sent by its indices, arrive at the places of the others'."""
    batch, plan = 2, context_plan(MASKS[name], LENGTH, RANKS)
    exchanges = [Exchange(plan, rank, batch, KV_HEADS) for rank in range(RANKS)]
    # The values of a row tell its batch entry, head and token.
    whole = torch.arange(batch * KV_HEADS * LENGTH).reshape(batch, KV_HEADS, LENGTH, 1)
    sent = []
    for rank, exchange in enumerate(exchanges):
        part = plan.shard(whole, rank)
        rows = (part if in_order else part.transpose(1, 2)).reshape(-1, 1)
        counts = [count + tags for count in exchange.sent]
        sent.append(rows.index_select(0, exchange._sources(in_order, tags, rows.device)).split(counts))
    for rank, exchange in enumerate(exchanges):
        assert [len(sent[other][rank]) - tags for other in range(RANKS)] == exchange.received
        assert exchange.received[rank] == 0 and sum(exchange.received) == plan.received_rows(KV_HEADS, batch)[rank]
        if not exchange.places:
            continue
        laid = exchange.laid(torch.cat([sent[other][rank] for other in range(RANKS)]), tags)
        assert laid.shape == (batch, KV_HEADS, exchange.places, 1)
        for b, g in np.ndindex(batch, KV_HEADS):
            row = Places(plan, rank, KV_HEADS).columns[0]
            columns = row[g if len(row) > 1 else 0]
            expected = torch.zeros(exchange.places, dtype=torch.int64)
            tokens = whole[b, g, columns.tokens, 0] * torch.from_numpy(columns.counts)
            expected[: len(columns.tokens)] = tokens
            assert torch.equal(laid[b, g, :, 0], expected)


def test_runs_of_rows():
    def of(length, *at):
        rows = np.zeros(length, bool)
        for first, end in at:
            rows[first:end] = True
        return runs(rows)

    assert of(100) == []
    assert of(8192, (70, 80)) == [(64, 128)]
    assert of(8192, (0, 100), (8000, 8190)) == [(0, 128), (8000, 8192)]
    assert of(8190, (8100, 8190)) == [(8064, 8190)]
    assert of(8192, (0, 64), (64 + GAP, 128 + GAP)) == [(0, 128 + GAP)]  # a short gap
    assert of(8192, (0, 6200)) == [(0, 8192)]  # most rows
    many = [(n * 4 * GAP, n * 4 * GAP + 1) for n in range(6)]
    assert of(64 * GAP, *many) == [(0, 20 * GAP + 64)]
