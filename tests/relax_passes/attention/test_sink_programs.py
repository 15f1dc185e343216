"""Sinks by hand against PyTorch's numbers in float64; what is refused, and why."""

import pytest
import torch

from tests.models.running import largest_error
from tests.relax_passes.attention.near_misses import inputs
from tests.relax_passes.attention.programs import All, in_double, program_of, reasons
from tests.relax_passes.attention.sink_programs import PROGRAMS


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(PROGRAMS), inputs())


@pytest.fixture(scope="module")
def expected():
    return in_double(PROGRAMS, inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, expected, index):
    """What is refused may also be what PyTorch makes of it in float32, where an exponential may be 0."""
    references = [expected[index], *([compiled.expected[index]] if PROGRAMS[index].reason else [])]
    assert min(largest_error(compiled.outputs[index], wanted) for wanted in references) < 3e-6


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_with_a_sink_and_nothing_else(compiled, program):
    found = reasons(compiled.mod, program)
    calls = [call for site, call in compiled.calls.items() if program_of(site) == program.name]
    assert [call.sink is not None for call in calls] == [True] * (program.reason is None), found
    assert len(found) == (program.reason is not None)
    assert program.reason is None or program.reason in found[0]


# Numbers that these name are none of half precision's.
FLOAT32_ONLY = ("finite_fills", "a_maximum_of_at_least_a_huge_negative_number")
ACCEPTED = [p for p in PROGRAMS if p.reason is None and not p.name.endswith(FLOAT32_ONLY)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_recognised_as_well(compile_model, dtype):
    q, k, v, keep, added = inputs()
    compiled = compile_model(All(ACCEPTED), (q.to(dtype), k.to(dtype), v.to(dtype), keep, added))
    with_sink = {program_of(site) for site, call in compiled.calls.items() if call.sink is not None}
    assert with_sink == {program.name for program in ACCEPTED}
