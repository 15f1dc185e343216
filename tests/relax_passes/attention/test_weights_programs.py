"""Weights that are changed after the softmax, against PyTorch's numbers; what becomes attention, and what does not."""

import pytest

from tests.models.running import largest_error
from tests.relax_passes.attention.near_misses import inputs
from tests.relax_passes.attention.programs import All, program_of, reasons
from tests.relax_passes.attention.weights_programs import PROGRAMS


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
