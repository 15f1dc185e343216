"""A rank's call in this process, with the exchange played: launches of a GPU, where kernels continue, and of a CPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from stof_tvm import masks, sparse_attention
from stof_tvm.attention import Options, attend
from stof_tvm.parallel import context_plan
from stof_tvm.parallel.context import attention
from stof_tvm.parallel.context.attention import _Call, can_continue
from stof_tvm.parallel.context.exchange import Places
from stof_tvm.parallel.context.merge import merged

LENGTH = 512
MASK = masks.sliding_window(40)
NOBODY = SimpleNamespace(group=None, answering=contextlib.nullcontext, begin=lambda: None, at=1)


class Played:
    """What a transfer brings: rows of the whole k and v in the places of a rank."""

    def __init__(self, laid: Places, whole):
        self.laid, self.whole = laid, whole

    def finish(self, wait):
        """k and v in their places."""
        (columns,) = self.laid.columns[0]
        found = []
        for x in self.whole:
            laid = x.new_zeros(*x.shape[:2], self.laid.count, x.shape[3])
            laid[:, :, : len(columns.tokens)] = x[:, :, columns.tokens] * torch.from_numpy(columns.counts)[:, None]
            found.append(laid)
        return found


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_own_keys_come_first_and_rows_with_received_keys_after(continues, return_lse, monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, LENGTH, 8), *torch.randn(2, 1, 2, LENGTH, 8)
    sink, plan, seen = torch.randn(4), context_plan(MASK, LENGTH, 2), []

    def as_a_gpu(q, k, v, given, bias, sink, options, earlier=()):
        seen.append((q.shape[2], k.shape[2], options.return_lse, sink is not None, bool(earlier)))
        if not earlier:
            return attend(q, k, v, given, bias, sink, options)
        # The kernel reads the earlier result in place of the first block.
        both = merged(earlier, attend(q, k, v, given, bias, sink, options._replace(return_lse=True)))
        return both if options.return_lse else both[:1]

    monkeypatch.setattr(attention, "attend", as_a_gpu)
    monkeypatch.setattr(attention, "can_continue", lambda device, kernel: continues)
    expected = sparse_attention(q, k, v, MASK, enable_gqa=True, sink=sink, return_lse=True)
    for rank in range(2):
        seen.clear()
        mine = [plan.shard(x, rank) for x in (q, k, v)]
        call = _Call(plan, rank, mine[0], mine[1])
        played = Played(Places(plan, rank, 2), (k, v))
        monkeypatch.setattr(call.exchange, "start", lambda k, v, group, tag, played=played: played)
        found = call(*mine, sink, Options(return_lse=return_lse), NOBODY)
        for part, whole, dim in zip(found[: 1 + return_lse], expected, (2, 2), strict=False):
            torch.testing.assert_close(part, plan.shard(whole, rank, dim), rtol=0, atol=2e-6)
        # Only the 64 rows at the border have received keys; the sink counts once.
        assert seen == [(256, 256, True, True, False), (64, 64, return_lse or not continues, False, continues)]


def test_where_kernels_continue():
    assert can_continue("cuda", None) and can_continue("cuda", "block-wise")
    assert not can_continue("cuda", "row-wise") and not can_continue("cpu", None)
