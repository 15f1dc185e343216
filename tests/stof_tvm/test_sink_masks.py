"""A user's mask reaches attention with sinks spelled by hand, and is refused where it would not."""

import math

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes import sink_programs
from tests.relax_passes.attention_near_misses import S, inputs, scores
from tests.relax_passes.sink_programs import PROGRAMS, All, One

AT_RUN_TIME = "a_pattern_at_run_time"
REACHED = [program for program in PROGRAMS if program.reason is None and program.name != AT_RUN_TIME]
REFUSED = [program for program in PROGRAMS if program.reason is not None or program.name == AT_RUN_TIME]
MASK = masks.sliding_window(1)


@pytest.fixture(scope="module")
def outputs():
    return stof_tvm.build(All(REACHED), QUICK_LLVM, inputs(), MASK, verify=False)(*inputs())


@pytest.mark.parametrize("index", range(len(REACHED)), ids=[program.name for program in REACHED])
def test_a_mask_reaches_the_scores(monkeypatch, outputs, index):
    """As the same program in float64 whose scores are masked; rows that both masks empty may be 0."""
    unmasked, dropped = REACHED[index].function(*inputs()).double(), ~MASK.dense(S)
    monkeypatch.setattr(sink_programs, "scores", lambda q, k: scores(q, k).masked_fill(dropped, -math.inf))
    q, k, v, keep, added = inputs()
    wanted = REACHED[index].function(q.double(), k.double(), v.double(), keep, added)
    got = outputs[index].double()
    is_row = wanted.isfinite()
    torch.testing.assert_close(got[is_row], wanted[is_row], atol=3e-6, rtol=0)
    assert ((got == 0) | got.isnan())[~is_row].all()
    assert not torch.allclose(got, unmasked, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("program", REFUSED, ids=[program.name for program in REFUSED])
def test_a_mask_that_would_not_reach_the_scores_is_refused(program):
    with pytest.raises(NotRewrittenError, match=program.reason or "computed from the model's inputs"):
        stof_tvm.build(One(program.function), QUICK_LLVM, inputs(), MASK, verify=False)
