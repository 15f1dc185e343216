"""Every near miss against PyTorch's numbers; what is refused, and why."""

import pytest

from relax_passes.canonicalize_attention import NOT_REWRITTEN
from tests.models.running import largest_error
from tests.relax_passes.attention_near_misses import PROGRAMS, All, inputs


@pytest.fixture(scope="module")
def compiled(compile_model):
    return compile_model(All(), inputs())


@pytest.mark.parametrize("index", range(len(PROGRAMS)), ids=[program.name for program in PROGRAMS])
def test_numbers_are_those_of_pytorch(compiled, index):
    tolerance = 3e-3 if "half" in PROGRAMS[index].name else 3e-6
    assert largest_error(compiled.outputs[index], compiled.expected[index]) < tolerance


def site_of(path) -> str:
    """The program's name: of several exponentials in one, the last is the softmax's."""
    return str(path).partition("#")[0]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_what_is_proved_becomes_attention_and_nothing_else(compiled, program):
    reasons = [str(reason) for site, reason in compiled.mod.attrs[NOT_REWRITTEN] if site_of(site) == program.name]
    assert (program.name in map(site_of, compiled.calls)) == (program.reason is None), reasons
    assert len(reasons) == (program.reason is not None)
    assert program.reason is None or program.reason in reasons[0]
