"""Sinks by hand against PyTorch's numbers in float64; what is refused, and why."""

import pytest
import torch

from relax_passes.canonicalize_attention import NOT_REWRITTEN
from tests.models.running import largest_error
from tests.relax_passes.attention_near_misses import inputs
from tests.relax_passes.sink_programs import PROGRAMS, All


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.fixture(scope="module")
def expected():
    wide = [x.double() if x.is_floating_point() else x for x in inputs()]
    with torch.no_grad():
        return [x.float() for x in All(PROGRAMS)(*wide)]


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, expected, index):
    """What is refused may also be what PyTorch makes of it in float32, where an exponential may be 0."""
    references = [expected[index], *([compiled.expected[index]] if PROGRAMS[index].reason else [])]
    assert min(largest_error(compiled.outputs[index], wanted) for wanted in references) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_with_a_sink_and_nothing_else(compiled, program):
    reasons = [
        str(reason) for site, reason in compiled.mod.attrs[NOT_REWRITTEN] if str(site).partition("#")[0] == program.name
    ]
    calls = [call for site, call in compiled.calls.items() if site.partition("#")[0] == program.name]
    assert [call.sink is not None for call in calls] == [True] * (program.reason is None), reasons
    assert len(reasons) == (program.reason is not None)
    assert program.reason is None or program.reason in reasons[0]


# Numbers that these name are none of half precision's.
FLOAT32_ONLY = ("finite_fills", "a_maximum_of_at_least_a_huge_negative_number")
ACCEPTED = [p for p in PROGRAMS if p.reason is None and not p.name.endswith(FLOAT32_ONLY)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_recognised_as_well(compile_model, dtype):
    q, k, v, keep, added = inputs()
    compiled = compile_model(All(ACCEPTED), (q.to(dtype), k.to(dtype), v.to(dtype), keep, added))
    with_sink = {site.partition("#")[0] for site, call in compiled.calls.items() if call.sink is not None}
    assert with_sink == {program.name for program in ACCEPTED}
