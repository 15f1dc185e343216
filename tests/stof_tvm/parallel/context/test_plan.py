"""Plans against brute force on dense masks: balance, who receives what, bytes."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError
from stof_tvm.parallel import context_plan
from tests.stof_tvm.parallel.context.some_masks import HEADS, documents, some_masks

LENGTH, BLOCK = 1531, 64
MASKS = some_masks(LENGTH)
KV_HEADS = {"by head": 2, "random, by head": 4}


@pytest.fixture(scope="module")
def dense() -> dict[str, np.ndarray]:
    """Boolean (1 or heads, length, length) by name."""
    return {name: mask.dense(LENGTH).numpy().reshape(-1, LENGTH, LENGTH) for name, mask in MASKS.items()}


def listed_blocks(dense: np.ndarray) -> np.ndarray:
    """int (length,): blocks of 64 × 64 that keep something in the block row of each token, over all heads."""
    n = -(-LENGTH // BLOCK)
    padded = np.zeros((len(dense), n * BLOCK, n * BLOCK), bool)
    padded[:, :LENGTH, :LENGTH] = dense
    counts = padded.reshape(-1, n, BLOCK, n, BLOCK).any(axis=(2, 4)).sum(axis=(0, 2))
    return np.repeat(counts, BLOCK)[:LENGTH]


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("name", MASKS)
def test_a_plan_is_balanced_and_moves_exactly_what_rows_keep(name, ranks, dense):
    plan, kv_heads = context_plan(MASKS[name], LENGTH, ranks), KV_HEADS.get(name, 1)
    tokens = [plan.tokens(rank).numpy() for rank in range(ranks)]
    assert sorted(np.concatenate(tokens)) == list(range(LENGTH)) and min(map(len, tokens)) > 0
    blocks = listed_blocks(dense[name])
    work = np.array([blocks[mine].sum() for mine in tokens])
    assert (work == plan.work).all()
    assert work.max() <= 1.03 * work.mean()
    for rank, mine in enumerate(tokens):
        needed = dense[name].reshape(min(kv_heads, len(dense[name])), -1, LENGTH, LENGTH)[:, :, mine].any(axis=(1, 2))
        needed[:, mine] = False
        received = plan.received(rank, kv_heads)[plan.classes(kv_heads)[0]]
        assert (received == needed).all()
        assert plan.received_rows(kv_heads)[rank] == needed.sum() * (kv_heads // len(needed))
        others = dense[name].any(axis=0)[mine]
        others[:, mine] = False
        assert (plan.rows_that_receive(rank) == others.any(axis=1)).all()
        assert plan.keeps_own(rank) == dense[name][:, mine][:, :, mine].any()


def test_windows_move_a_halo():
    plan = context_plan(masks.sliding_window(256), 16384, 4)
    assert plan.way == "equal runs" and plan.imbalance < 0.03
    assert plan.received_rows(1).tolist() == [256, 512, 512, 256]
    assert np.diff(plan.tokens(2).numpy()).max() == 1


def test_ranks_where_less_is_kept_have_longer_runs():
    plan = context_plan(masks.a_shape(4, 1024), 16384, 4)  # the first rows keep less
    assert plan.way == "runs of equal work" and plan.imbalance < 0.03
    assert plan.received_rows(1).tolist() == [0, 1028, 1028, 1028]
    assert len(plan.tokens(0)) > len(plan.tokens(1))


def test_causal_ranks_have_equal_tokens_of_both_ends():
    plan = context_plan(masks.causal(), 16384, 4)
    assert plan.way == "two runs each" and plan.imbalance < 0.001
    assert [len(plan.tokens(rank)) for rank in range(4)] == [4096] * 4


def test_documents_are_cut_only_where_they_cannot_be_balanced():
    one_long = masks.document([900, 124])
    plan = context_plan(one_long, 1024, 2)
    assert plan.imbalance <= 0.03 and plan.received_rows(1).sum() > 0
    assert context_plan(masks.document([512, 512]), 1024, 2).received_rows(1).sum() == 0


def test_shard_and_unshard():
    plan = context_plan(masks.causal(), 100, 3)
    x = torch.arange(200.0).reshape(2, 100, 1)
    parts = [plan.shard(x, rank) for rank in range(3)]
    assert all((part[1, :, 0] == plan.tokens(rank) + 100).all() for rank, part in enumerate(parts))
    assert torch.equal(plan.unshard(parts), x)
    flat = [plan.shard(x[..., 0], rank, dim=1) for rank in range(3)]
    assert torch.equal(plan.unshard(flat, dim=1), x[..., 0])
    with pytest.raises(InputError, match="100 tokens along dimension -1"):
        plan.shard(x, 0, dim=-1)
    with pytest.raises(InputError, match="3 ranks has as many parts, got 2"):
        plan.unshard(parts[:2])
    with pytest.raises(InputError, match="tokens along dimension"):
        plan.unshard(parts[::-1])
    with pytest.raises(InputError, match=r"rank 3 is not in 0…2"):
        plan.tokens(3)


def test_equal_masks_share_a_plan_and_tensors_are_masks():
    assert context_plan(masks.causal(), 128, 2) is context_plan(masks.causal(), 128, 2)
    dense = masks.sliding_window(5).dense(128)
    assert context_plan(dense, 128, 2).digest == context_plan(masks.sliding_window(5), 128, 2).digest
    assert context_plan(dense.expand(HEADS, 128, 128), 128, 2).received_rows(2).tolist() == [10, 10]
    assert context_plan(None, 128, 2).received_rows(1).tolist() == [64, 64]
    assert context_plan(lambda b, h, i, j: i >= j, 128, 2).digest == context_plan(masks.causal(), 128, 2).digest


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ((masks.causal(), 128, 0), InputError, "ranks=0 must be a positive integer"),
        ((masks.causal(), 128, -1), InputError, "ranks=-1 .*: the world size of a group that this process is not in"),
        (
            (masks.causal(), 31, 4),
            InputError,
            "length=31 must be an integer number of tokens, at least 8 for each of 4",
        ),
        ((masks.document(documents(64)), 128, 2), MaskError, "sum to"),
        ((masks.causal() & ~masks.causal(), 128, 2), MaskError, "keeps nothing"),
        (("causal", 128, 2), MaskError, "text"),
        ((lambda b, h, i, j: i >= j + h, 128, 2), MaskError, "head"),
    ],
)
def test_what_is_refused(arguments, error, why):
    with pytest.raises(error, match=why):
        context_plan(*arguments)


def test_heads_that_do_not_divide():
    plan = context_plan(masks.per_head([masks.causal(), masks.strided(5), masks.sliding_window(3)]), 128, 2)
    with pytest.raises(MaskError, match="3 heads, no multiple of the 2 of k"):
        plan.classes(2)


def test_what_is_kept_for_one_call_suits_every_other():
    """Indices made in inference mode, or while a model is traced, are not those of a call that autograd records."""
    plan, x = context_plan(masks.causal(), 512, 2), torch.randn(2, 512, 8)

    def there_and_back(x):
        return plan.unshard([plan.shard(x, rank) for rank in range(2)])

    with torch.inference_mode():
        assert torch.equal(there_and_back(x), x)
    y = x.clone().requires_grad_()
    there_and_back(y).sum().backward()
    assert torch.equal(y.grad, torch.ones_like(x))
    other = context_plan(masks.causal(), 256, 2)
    with FakeTensorMode():
        with pytest.raises(AssertionError, match="Fake"):
            other.shard(x[:, :256], 0)  # PyTorch's refusal of what is no fake tensor
        assert there_and_back(torch.empty(2, 512, 8)).shape == (2, 512, 8)
    assert torch.equal(there_and_back(x), x)
    assert torch.equal(other.shard(x[:, :256], 0), x[:, other.tokens(0)])
    assert torch.equal(torch.func.vmap(there_and_back)(x), x)


def test_a_traced_model_may_shard():
    class Model(torch.nn.Module):
        def forward(self, x):
            return plan.unshard([2 * plan.shard(x, rank) for rank in range(2)])

    plan, x = context_plan(masks.causal(), 512, 2), torch.randn(2, 512, 8)
    for _ in range(2):  # indices are kept from the second call on
        assert torch.equal(torch.export.export(Model(), (x,)).module()(x), 2 * x)
        assert torch.equal(Model()(x), 2 * x)
