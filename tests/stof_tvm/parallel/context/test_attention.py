"""Two processes with gloo, on LLVM: results of one process, bytes that the mask asks for, errors of one for both."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stof_tvm import masks, sparse_attention
from stof_tvm.errors import InputError
from stof_tvm.parallel import context_plan
from tests.stof_tvm.parallel.context.two_ranks import CASES, case, plan_for

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    """What each of the two processes found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    folder = tmp_path_factory.mktemp("ranks")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TVM_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment["TVM_BIND_THREADS"] = "0"
    script = [sys.executable, "-m", "tests.stof_tvm.parallel.context.two_ranks"]
    ranks = [
        subprocess.Popen(
            [*script, str(rank), port, str(folder / f"{rank}.pt")],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=300)
        assert rank.returncode == 0, errors
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_process(name, found):
    mask, q, k, v, options = case(name)
    plan, _ = plan_for(name)
    out, lse = (plan.unshard([each[name][part] for each in found], dim=2) for part in ("out", "lse"))
    inputs = [x.float() for x in (q, k, v)]
    expected, expected_lse = sparse_attention(*inputs, mask, enable_gqa=True, return_lse=True, **options)
    error = (out.float() - expected).abs().max()
    if q.dtype == torch.float32:
        assert error < 2e-6
    else:
        alone = sparse_attention(q, k, v, mask, enable_gqa=True, **options)
        assert error <= 2 * (alone.float() - expected).abs().max()
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=2e-6)
    assert all(torch.equal(each[name]["out"], each[name]["again"]) for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_only_what_rows_keep_is_moved(name, found):
    mask, q, k, v, _ = case(name)
    batch, length = len(q), q.shape[2]
    dense = mask if isinstance(mask, torch.Tensor) else mask.dense(length)
    dense = dense.expand(batch, q.shape[1], length, length).reshape(batch, k.shape[1], -1, length, length)
    for rank, each in enumerate(found):
        tokens = plan_for(name)[0].tokens(rank)
        needed = dense[:, :, :, tokens].any(dim=3).any(dim=2)
        needed[:, :, tokens] = False
        tags = 2 * k.shape[3] * bool(found[0][name]["bytes"])  # a row from each rank that tells which call it is of
        assert each[name]["bytes"] == (needed.sum() * (k.shape[3] + v.shape[3]) + tags) * k.element_size()
    assert ("documents" in name) == (sum(each[name]["bytes"] for each in found) == 0)


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_by_all(found):
    assert found[1]["bias"].startswith("UnsupportedError: a bias with a group")
    told = "ParallelError: rank 1 failed (a first attention): "
    assert found[0]["bias"].startswith(f"{told}UnsupportedError: a bias with a group")
    assert found[1]["other tokens"].startswith("InputError: rank 1 has 64 of the 128 tokens by the plan, got q with 63")
    assert found[0]["other tokens"].startswith(f"{told}InputError: rank 1 has 64 of the 128 tokens")


@pytest.mark.slow
def test_rules_are_not_cut_among_ranks(found):
    for each in found:
        assert each["rule"].startswith("MaskError: top_blocks(1, block=64) with group=: a rule is not cut among ranks")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["other masks", "other length", "other plan"])
def test_ranks_must_mean_the_same(what, found):
    for each in found:
        assert each[what].startswith("ParallelError: rank 1 calls with ") and "rank 0 with" in each[what]


@pytest.mark.slow
def test_a_plan_is_one_for_the_group(found):
    for each in found:
        assert each["no plan"] == "InputError: plan must be what parallel.context_plan makes, got str"
        assert each["three ranks"] == "InputError: the plan is one for 3 ranks, the group has 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("silent", "rank 1 is gone, or did not answer within 2 s (a first attention)"),
        ("gone, at a known call", "the exchange of keys failed, rank 1 is gone or does not answer; rank 0 saw: "),
        ("gone, at a new call", "rank 1 is gone, or did not answer within 600 s (a call after one that failed)"),
    ],
)
def test_a_rank_that_does_not_answer_is_named(what, words, found):
    assert found[0][what].startswith(f"ParallelError: rank 0: {words}")


def test_after_a_call_that_one_rank_refused_nothing_is_exchanged(found):
    assert found[1]["refused alone"].startswith("InputError: rank 1 has 64 of the 128 tokens")
    assert found[1]["after it"].startswith("ParallelError: rank 1: rank 0 is gone, or did not answer within 2 s")


def test_one_process_has_no_group():
    x = torch.randn(1, 1, 16, 8)
    with pytest.raises(InputError, match="group must be a torch.distributed.ProcessGroup that this process is in"):
        sparse_attention(x, x, x, masks.causal(), group="all")
    with pytest.raises(InputError, match="plan says how a group of ranks shares a sequence: give group, too"):
        sparse_attention(x, x, x, masks.causal(), plan=context_plan(masks.causal(), 16, 1))
