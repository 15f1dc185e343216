"""Scores multiplied by tensors, against PyTorch's numbers; what becomes attention, and what does not."""

from unittest import mock

import pytest
import torch

import stof_tvm
from relax_passes.ir.bindings import dtype_of
from stof_tvm import masks
from stof_tvm.errors import NotRewrittenError
from tests.models.quick_llvm import QUICK_LLVM
from tests.models.running import largest_error
from tests.relax_passes.attention.factor_programs import PROGRAMS
from tests.relax_passes.attention.near_misses import S, inputs
from tests.relax_passes.attention.programs import All, One, program_of, reasons

REACHED = [program for program in PROGRAMS if program.reason is None]
REFUSED = [program for program in PROGRAMS if program.reason is not None]
MASK = masks.sliding_window(2)
HALVES = [program for program in PROGRAMS if program.name in ("cosine", "of_each_query", "of_queries_and_of_keys")]


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, index):
    assert largest_error(compiled.outputs[index], compiled.expected[index]) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_and_nothing_else(compiled, program):
    found = reasons(compiled.mod, program)
    assert (program.name in map(program_of, compiled.calls)) == (program.reason is None), found
    assert len(found) == (program.reason is not None)
    assert program.reason is None or program.reason in found[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_as_exact_as_in_pytorch(compile_model, dtype):
    """Twice the error that PyTorch's scores in half precision have, both against float32."""
    q, k, v, keep, added = (x.to(dtype) if x.is_floating_point() else x for x in inputs())
    wide = [q.float(), k.float(), v.float(), keep, added.float()]
    compiled = compile_model(All(HALVES), (q, k, v, keep, added))
    assert len(compiled.calls) == len(HALVES)
    for program, got, half in zip(HALVES, compiled.outputs, compiled.expected, strict=True):
        exact = program.function(*wide)
        assert got.dtype == dtype
        assert largest_error(got.float(), exact) <= 2 * largest_error(half.float(), exact), program.name
    name = str(dtype).removeprefix("torch.")
    kept = {program_of(site): dtype_of(call.q) == name for site, call in compiled.calls.items()}
    # Rows of the length 1, and factors that are known: nothing overflows.  Of queries that are given nothing is known.
    assert kept["cosine"] and (kept["of_each_query"] == (dtype == torch.bfloat16))


@pytest.fixture(scope="module")
def masked():
    return stof_tvm.build(All(REACHED), QUICK_LLVM, inputs(), MASK, verify=False)(*inputs())


@pytest.mark.parametrize("index", range(len(REACHED)), ids=[program.name for program in REACHED])
def test_a_mask_reaches_the_scores(masked, index):
    """As with a softmax that is masked."""
    softmax, kept = torch.softmax, MASK.dense(S)

    def of_kept(x, dim):
        return softmax(x.masked_fill(~(kept if dim == -1 else kept.T), -torch.inf), dim)

    with mock.patch.object(torch, "softmax", of_kept):
        expected = REACHED[index].function(*inputs())
    is_row = expected.isfinite()
    assert is_row.float().mean() > 0.4
    torch.testing.assert_close(masked[index][is_row], expected[is_row], atol=1e-5, rtol=0)
    assert ((masked[index] == 0) | masked[index].isnan())[~is_row].all()


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k: q @ k.mT / torch.tensor([0.0] + [1.0] * (S - 1)),
        lambda q, k: q @ k.mT * torch.tensor([torch.inf] + [1.0] * (S - 1)),
    ],
    ids=["divided by 0", "times inf"],
)
def test_infinite_factors_stay_as_they_are(function):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return torch.softmax(function(q, k), -1) @ v

    q, k, v = (torch.randn(1, 2, S, 8, generator=torch.Generator().manual_seed(n)) for n in range(3))
    engine = stof_tvm.build(Model(), QUICK_LLVM, (q, k, v), verify=False)
    torch.testing.assert_close(engine(q, k, v), Model()(q, k, v), equal_nan=True, atol=1e-5, rtol=0)
    with pytest.raises(NotRewrittenError, match="multiplied by infinite numbers, or divided by 0"):
        stof_tvm.build(Model(), QUICK_LLVM, (q, k, v), MASK, verify=False)


@pytest.mark.parametrize("program", REFUSED[:6], ids=[program.name for program in REFUSED[:6]])
def test_a_mask_that_would_not_reach_the_scores_is_refused(program):
    with pytest.raises(NotRewrittenError, match=program.reason):
        stof_tvm.build(One(program.function), QUICK_LLVM, inputs(), MASK, verify=False)
