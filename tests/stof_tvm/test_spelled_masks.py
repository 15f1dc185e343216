"""A user's mask reaches sinks by hand, transposed scores and weights masked again, or is refused."""

import pytest
import torch

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM
from tests.relax_passes.attention import (
    plain_weights_programs,
    sink_programs,
    transposed_programs,
    weights_programs,
)
from tests.relax_passes.attention.near_misses import S, inputs
from tests.relax_passes.attention.programs import All, One, Program

SINGLE_KEY = "logits_before_a_single_key"  # which this mask does not fit
PLAIN = [Program(function, "without a softmax") for function in plain_weights_programs.ATTENTION]
LISTS = [x.PROGRAMS for x in (sink_programs, transposed_programs, weights_programs)]
PROGRAMS = [*(program for programs in LISTS for program in programs), *PLAIN]
REACHED = [program for program in PROGRAMS if program.reason is None and program.name != SINGLE_KEY]
REFUSED = [program for program in PROGRAMS if program.reason is not None]
KEPT = torch.ones(S, S, dtype=torch.bool).tril() & ~torch.ones(S, S, dtype=torch.bool).tril(-3)
KEPT[:, 0] = True
MASK = masks.from_tensor(KEPT)


@pytest.fixture(scope="module")
def outputs():
    results = []
    for programs in LISTS:
        model = All([program for program in programs if program in REACHED])
        results += stof_tvm.build(model, QUICK_LLVM, inputs(), MASK, verify=False)(*inputs())
    return results


@pytest.mark.parametrize("index", range(len(REACHED)), ids=[program.name for program in REACHED])
def test_a_mask_reaches_the_scores(outputs, index):
    """As the same program in float64, of queries and keys whose products are far below 0 where the mask drops them."""
    q, k, v, keep, added = inputs()
    unmasked = REACHED[index].function(q, k, v, keep, added).double()
    far = -1e8 * torch.eye(S, dtype=torch.float64).expand(*k.shape[:3], S)
    wanted = REACHED[index].function(
        torch.cat([q.double(), (~KEPT).double().expand(*q.shape[:3], S)], -1),
        torch.cat([k.double(), far], -1),
        v.double(),
        keep,
        added,
    )
    got = outputs[index].double()
    is_row = wanted.isfinite()
    assert is_row.float().mean() > 0.4
    torch.testing.assert_close(got[is_row], wanted[is_row], atol=3e-6, rtol=0)
    assert ((got == 0) | got.isnan())[~is_row].all()
    assert not torch.allclose(got, unmasked, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("program", REFUSED, ids=[program.name for program in REFUSED])
def test_a_mask_that_would_not_reach_the_scores_is_refused(program):
    with pytest.raises(NotRewrittenError, match=program.reason):
        stof_tvm.build(One(program.function), QUICK_LLVM, inputs(), MASK, verify=False)
