"""Blocks that differ from a rule's: those that may as well have been chosen pass, one real choice does not."""

import pytest
import torch

import stof_tvm
from stof_tvm.rules.near_ties import near_ties
from stof_tvm.verification.comparison import CLOSE
from tests.models.quick_llvm import QUICK_LLVM
from tests.stof_tvm.rules.rule_models import EVERY_RULE, RULES, Attend, tensors
from tir_kernels.errors import VerificationError

NEAR = CLOSE[torch.float32]
TIED = {
    "zeros": lambda x: torch.zeros_like(x),
    "ones": lambda x: torch.ones_like(x),
    "one token": lambda x: x[:, :, :1].expand_as(x).contiguous(),
    "padded": lambda x: torch.cat([x[:, :, :20], torch.zeros_like(x[:, :, 20:])], 2),
    "tiny": lambda x: x * 1e-6,
    "saturated": lambda x: x * 50,
}
OTHERS = {
    "low_rank": RULES.low_rank(k=2, block=32, causal=False),
    "low_rank_causal": RULES.low_rank(k=2, block=32),
    "bounds": RULES.top_blocks(2, block=32, pool="bounds"),
    "sparge": RULES.sparge(0.5, similarity=-1, block=32),
    "flex_prefill": RULES.flex_prefill(0.5, tau=0.5, least=32, block=32),
    "flash_prefill": RULES.flash_prefill(0.5, sinks=1, window=1, last=1, block=32),
}


@pytest.mark.parametrize(
    "rule, tied",
    [
        *(("bounds", tied) for tied in TIED),
        *(("low_rank", tied) for tied in ("zeros", "tiny", "saturated")),
        *(("vertical_slash", tied) for tied in ("zeros", "tiny", "padded")),
        *((rule, "zeros") for rule in (*EVERY_RULE, *OTHERS) if rule not in ("bounds", "low_rank", "vertical_slash")),
    ],
)
def test_engines_of_inputs_that_tie_are_right(rule, tied):
    q, k, v = tensors()
    call = TIED[tied](q), TIED[tied](k), v
    engine = stof_tvm.build(Attend(), QUICK_LLVM, call, {**EVERY_RULE, **OTHERS}[rule])
    assert engine.report().verification.result == "passed"


def shuffled(rule, q, k, seed):
    """What the rule keeps if blocks of keys come in another order: another choice among equal ones only."""
    order = torch.randperm(k.shape[2] // rule.block[1], generator=torch.Generator().manual_seed(seed))
    tokens = (order[:, None] * rule.block[1] + torch.arange(rule.block[1])).flatten()
    kept = torch.empty_like(found := rule.block_map(q, k[:, :, tokens]))
    kept[..., order] = found
    return kept


def half_tied(blocks):
    """q and k of so many blocks of 32; the first 4 of keys differ, and two rows of queries can tell them from zeros."""
    q, k, _ = tensors(length=32 * blocks)
    q[:, :, :64], q[:, :, 64:] = q[:, :, :1].abs(), 0
    k[:, :, 128:] = 0
    k[:, :, :128] = torch.arange(4.0, 0, -1).repeat_interleave(32)[:, None]
    return q, k


@pytest.mark.parametrize("blocks, kept", [(5, 1), (8, 2), (8, 6), (40, 1), (40, 5), (40, 36)])
@pytest.mark.parametrize("pool", ["mean", "bounds"])
def test_any_choice_among_equal_blocks_is_one_of_the_rule(blocks, kept, pool):
    rule = RULES.top_blocks(kept, block=32, pool=pool)
    q, k = half_tied(blocks)
    own = rule.block_map(q, k)
    others = [shuffled(rule, q, k, seed) for seed in range(3)]
    assert not all(torch.equal(other, own) for other in others)
    for other in others:
        assert near_ties("", rule, other, q, k, NEAR) == int((other != own).sum())


@pytest.mark.parametrize("blocks, kept", [(5, 1), (8, 2), (40, 2)])
@pytest.mark.parametrize("pool", ["mean", "bounds"])
def test_one_wrong_choice_is_found_whatever_ties_in_other_rows(blocks, kept, pool):
    rule = RULES.top_blocks(kept, block=32, pool=pool)
    q, k = half_tied(blocks)
    wrong = shuffled(rule, q, k, 0)
    assert wrong[0, 0, 1, 0] and not wrong[0, 0, 1, 3]
    wrong[0, 0, 1, 0], wrong[0, 0, 1, 3] = False, True
    with pytest.raises(VerificationError, match=f"of {wrong.numel()} blocks that the engine found are not those"):
        near_ties("", rule, wrong, q, k, NEAR)


def test_one_wrong_choice_is_found_in_a_row_in_which_others_tie():
    """Four of six are clear; the others are any of those that are zeros."""
    rule = RULES.top_blocks(6, block=32)
    q, k = half_tied(40)
    right = shuffled(rule, q, k, 1)
    assert near_ties("", rule, right, q, k, NEAR)
    wrong = right.clone()
    wrong[1, 3, 0, 2] = False  # one of the four that are better than zeros
    with pytest.raises(VerificationError):
        near_ties("", rule, wrong, q, k, NEAR)


@pytest.mark.parametrize("name", ["low_rank", "sparge"])
def test_one_wrong_choice_of_a_rule_of_weights_is_found(name):
    rule = OTHERS[name]
    q, k, _ = tensors(length=160)
    wrong = rule.block_map(q, k)
    row = wrong[1, 2, 3]
    row[int(row.int().argmax())] = False
    with pytest.raises(VerificationError):
        near_ties("", rule, wrong, q, k, NEAR)


def test_a_tie_of_a_short_last_block_is_one():
    """The extremes of its few tokens would never be the largest if every token moved by itself."""
    rule = RULES.top_blocks(1, block=32, pool="bounds")
    q, k = torch.ones(2, 1, 2, 100, 64)
    last = torch.zeros(1, 2, 4, 4, dtype=torch.bool)
    last[..., -1] = True
    assert not rule.block_map(q, k)[..., -1].all()
    assert near_ties("", rule, last, q, k, NEAR)


def test_what_a_function_only_compares_is_not_moved():
    """Numbers that no operator rounds stay exact, and so does what they choose."""
    rule = RULES.rule(lambda q, k: (q[:, :, ::32, :1] * 0 + torch.arange(3.0)) == 1, block=32)
    q, k = torch.ones(2, 1, 1, 96, 16)
    own = rule.block_map(q, k)
    assert near_ties("", rule, own, q, k, NEAR) == 0
